"""What changed between two runs."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mismatch_probe.config.nested import differences
from mismatch_probe.reading import Unreadable, parse_json
from mismatch_probe.records.difference import APPLIED, Change
from mismatch_probe.records.manifest import Manifest

_ABSENT = "absent"
_NAMES: Final = {"True": "true", "False": "false", "None": "none"}
_WORDS: Final = {"true": True, "false": False, "none": None, "null": None}


def changes(first: Manifest, second: Manifest) -> list[Change]:
    """Everything that differs between two manifests and may change a number; where and when they were made may not."""
    return [
        Change(kind=kind, name=name, first=texts[0], second=texts[1])
        for kind, before, after in _parts(first, second)
        for name, old, new in differences(before, after, _ABSENT)
        for texts in [_texts(old, new)]
    ]


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


def _texts(before: Any, after: Any) -> tuple[str, str]:
    """Both as a file of settings writes them; in quotes where they read alike otherwise."""
    old, new = (value if isinstance(value, str) else _NAMES.get(repr(value), repr(value)) for value in (before, after))
    return (repr(before), repr(after)) if old == new else (old, new)
