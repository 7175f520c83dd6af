"""What changed between two runs, and the one record that `diff` answers with."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from mismatch_probe.config.nested import differences
from mismatch_probe.notation import write_count
from mismatch_probe.reading import Unreadable, parse_json
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.summary import Counts, Record
from mismatch_probe.stats.results import Estimate

APPLIED: Final = "effective settings"
_ABSENT = "absent"
_NAMES: Final = {"True": "true", "False": "false", "None": "none"}
_WORDS: Final = {"true": True, "false": False, "none": None, "null": None}


class Change(Record):
    """One thing that differs; `kind` is the part of the manifest it stands in."""

    kind: str
    name: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.name} {self.first} -> {self.second}"


def changes(first: Manifest, second: Manifest) -> list[Change]:
    """Everything that differs between two manifests and may change a number; where and when they were made may not."""
    return [
        Change(kind=kind, name=name, first=told[0], second=told[1])
        for kind, before, after in _parts(first, second)
        for name, old, new in differences(before, after, _ABSENT)
        for told in [_told_apart(old, new)]
    ]


def told_once(changes: Iterable[Change]) -> list[tuple[Change, list[str]]]:
    """Each change, and where it is one of what both sides really applied, the stages in which it is the same; its name
    is then that of the setting alone.
    """
    stages: dict[tuple[str, str, str, str], list[str]] = {}
    for change in changes:
        stage, _, setting = change.name.partition(".")
        is_applied = change.kind == APPLIED
        key = (change.kind, setting if is_applied else change.name, change.first, change.second)
        stages.setdefault(key, []).extend([stage] if is_applied else [])
    return [
        (Change(kind=kind, name=name, first=first, second=second), where)
        for (kind, name, first, second), where in stages.items()
    ]


def places(stages: Sequence[str]) -> str:
    """`sample-bf16 and 2 other stages`."""
    others = len(stages) - 1
    return stages[0] + (f" and {others} other stage{'s' if others > 1 else ''}" if others else "")


def version_changes(first: Manifest, second: Manifest) -> list[Change]:
    return [change for change in changes(first, second) if change.kind == "versions"]


def _parts(first: Manifest, second: Manifest) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    yield "versions", first.versions, second.versions
    yield "settings", _settings(first), _settings(second)
    model = {"fingerprint", "architecture", "checkpoint_dtype"}
    yield "model", first.model.model_dump(include=model), second.model.model_dump(include=model)
    yield "hardware", first.hardware, second.hardware
    yield "git", first.git or {}, second.git or {}
    stages = sorted(first.stages.keys() & second.stages.keys())
    yield (
        APPLIED,
        {name: first.stages[name].effective_settings for name in stages},
        {name: second.stages[name].effective_settings for name in stages},
    )


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Sides by name, with what they were given. Earlier runs kept the text of a flag where a file gives a number: each
    argument as the value it spells.
    """
    settings = manifest.settings.model_dump(mode="json")
    args = settings["engine"]["args"]
    engine = settings["engine"] | {"args": {name: _spelled(args[name]) for name in args}}
    sides = {role: {side["name"]: _given(side) for side in settings[role]} for role in ("train", "infer")}
    return settings | {"engine": engine, "pairs": ", ".join(map("/".join, settings["pairs"]))} | sides


def _given(side: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of a side beside its name."""
    unsaid = {"name": side["name"], "logged": False, "args": {}}
    return {name: value for name, value in side.items() if value is not None and value != unsaid.get(name)}


def _spelled(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return _WORDS[value.lower()] if value.lower() in _WORDS else parse_json(value)
    except Unreadable:
        return value


def _told_apart(before: Any, after: Any) -> tuple[str, str]:
    """Both as a file of settings writes them; in quotes where they read alike otherwise."""
    old, new = (value if isinstance(value, str) else _NAMES.get(repr(value), repr(value)) for value in (before, after))
    return (repr(before), repr(after)) if old == new else (old, new)


class Side(Record):
    """One of the two runs."""

    run: str
    model: str
    model_fingerprint: str
    created_at: str
    tool_version: str


class MetricDifference(Record):
    """A metric in both runs; difference: second - first; ratio: second / first, of positive values."""

    first: Estimate
    second: Estimate
    difference: Estimate | None
    ratio: Estimate | None


class BinDifference(Record):
    """abs(d) of tokens at positions, or in responses of lengths, from `low` up to, not including, `high`."""

    low: int
    high: int
    abs_logprob_diff: MetricDifference

    @property
    def tokens(self) -> str:
        """`3 to 4`, numbered from 1."""
        first, last = self.low + 1, self.high
        return write_count(first) if first == last else f"{write_count(first)} to {write_count(last)}"


class PairDifference(Record):
    """One pair of dtypes (`TRAIN/INFER`) of the first run against one of the second.

    comparison: `paired` where every response has the same token ids in both runs. moved: by side (`pi`, `mu`), how far
    its log-probs lie from its own in the other run, mean abs in nats, on the same tokens; empty where there are none.
    no_ratio: why the metrics have no ratio, where one of the two is a bug or broken.
    """

    first_pair: str
    second_pair: str
    comparison: Literal["paired", "two-sample"]
    shared_prompts: int
    shared_responses: int
    same_responses: int
    first_counts: Counts
    second_counts: Counts
    sentence: str
    no_ratio: str = ""
    moved: dict[str, Estimate]
    metrics: dict[str, MetricDifference]
    by_position: list[BinDifference]
    by_response_length: list[BinDifference]


class Difference(Record):
    """Two runs side by side.

    rescored_with: the run whose settings the second was made with, from the first run's responses; mu's log-probs are
    then those of a prefill in both. None where the second run sampled its own.
    """

    schema_version: int = 1
    tool_version: str
    first: Side
    second: Side
    rescored_with: str | None = None
    changes: list[Change]
    pairs: list[PairDifference]
    only_first: list[str]
    only_second: list[str]
