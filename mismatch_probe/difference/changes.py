"""What changed between two runs: versions, settings, checkpoint, hardware, code, and what both sides really applied."""

from collections.abc import Iterator, Mapping
from typing import Any

from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.summary import Record

_ABSENT = "absent"


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
        Change(kind=kind, name=name, first=_text(old), second=_text(new))
        for kind, before, after in _parts(first, second)
        for name, old, new in _differences(before, after)
    ]


def version_changes(first: Manifest, second: Manifest) -> list[Change]:
    return [change for change in changes(first, second) if change.kind == "versions"]


def _parts(first: Manifest, second: Manifest) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    yield "versions", first.versions, second.versions
    yield "settings", first.settings.model_dump(mode="json"), second.settings.model_dump(mode="json")
    model = {"fingerprint", "architecture", "checkpoint_dtype"}
    yield "model", first.model.model_dump(include=model), second.model.model_dump(include=model)
    yield "hardware", first.hardware, second.hardware
    yield "git", first.git or {}, second.git or {}
    stages = sorted(first.stages.keys() & second.stages.keys())
    yield (
        "effective settings",
        {name: first.stages[name].effective_settings for name in stages},
        {name: second.stages[name].effective_settings for name in stages},
    )


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    old, new = dict(_leaves(first)), dict(_leaves(second))
    for name in old | new:
        if old.get(name, _ABSENT) != new.get(name, _ABSENT):
            yield name, old.get(name, _ABSENT), new.get(name, _ABSENT)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
