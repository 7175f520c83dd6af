"""What runs code is not taken from a run directory, which a stranger may have made: it counts when it is given now."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mismatch_probe.command_line import words_line
from mismatch_probe.config.nested import merged
from mismatch_probe.errors import UsageError

_PLAIN_WORD: Final = re.compile(r"[\w+-]*")
"""A number or a name of the engine's own: code and files are named with dots, colons, slashes or in tables."""
_REWARDS: Final = (("task", "reward"), ("evaluation", "reward"))

Place = tuple[str, ...]


def going_on(run: Path, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings recorded in `run`, with those given now laid over them.

    Raises:
        UsageError: what was recorded runs code and is not given now.
    """
    missing = [word for place, words in _code(recorded).items() if _at(given, place) is None for word in words]
    if missing:
        raise UsageError(
            f"{run} was made with {words_line(*missing)}: what runs code is not taken from a run directory; give it "
            "again if you trust it"
        )
    return merged(recorded, given)


def code_flags(settings: Mapping[str, Any]) -> list[str]:
    """What of the settings runs code, as it is given on the command line."""
    return [word for words in _code(settings).values() for word in words]


def _code(settings: Mapping[str, Any]) -> dict[Place, list[str]]:
    """Where settings run code of a checkpoint or name code, and the words that give them."""
    found: dict[Place, list[str]] = {}
    trusted = ("model", "trust_remote_code")
    if _at(settings, trusted):
        found[trusted] = ["--trust-remote-code"]
    for place in _REWARDS:
        reward = _at(settings, place)
        if isinstance(reward, str) and ":" in reward:
            found[place] = ["--reward", reward]
    for name, value in (_at(settings, ("engine", "args")) or {}).items():
        if not _is_harmless(value):
            found["engine", "args", name] = [f"--vllm.{name}", value if isinstance(value, str) else json.dumps(value)]
    return found


def _is_harmless(value: Any) -> bool:
    if not isinstance(value, str):
        return value is None or isinstance(value, bool | int | float)
    try:
        float(value)
    except ValueError:
        return _PLAIN_WORD.fullmatch(value) is not None
    return True


def _at(settings: Mapping[str, Any], place: Place) -> Any:
    below: Any = settings
    for name in place:
        below = below.get(name) if isinstance(below, Mapping) else None
    return below
