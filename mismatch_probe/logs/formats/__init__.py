"""Every format that is read, one file a system, and which one a log is in by its content."""

from collections import Counter
from pathlib import Path
from typing import Final

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.formats.conversations import HARBOR, NEMO_GYM
from mismatch_probe.logs.formats.nemo_rl import NEMO_RL
from mismatch_probe.logs.formats.open_instruct import OPEN_INSTRUCT
from mismatch_probe.logs.formats.plain import PLAIN
from mismatch_probe.logs.formats.prime_rl import PRIME_RL, PRIME_RL_TRACES
from mismatch_probe.logs.formats.responses import SGLANG_RESPONSES, VLLM_RESPONSES
from mismatch_probe.logs.formats.skyrl import SKYRL
from mismatch_probe.logs.formats.slime import MILES, MILES_TRAIN, SLIME, SLIME_ROLLOUT
from mismatch_probe.logs.formats.texts import AREAL, RLLM, ROLL, TRL, VERL_TEXT
from mismatch_probe.logs.formats.tinker import TINKER
from mismatch_probe.logs.formats.verl import VERL, VERL_PROTOCOL
from mismatch_probe.logs.look import NoLogError, files_of, look_at
from mismatch_probe.plugins import ContractError, Registry

_BUILT_IN: Final = (
    PLAIN,
    NEMO_RL,
    PRIME_RL,
    PRIME_RL_TRACES,
    SLIME,
    SLIME_ROLLOUT,
    SKYRL,
    MILES,
    MILES_TRAIN,
    OPEN_INSTRUCT,
    TINKER,
    VERL,
    VERL_PROTOCOL,
    VLLM_RESPONSES,
    SGLANG_RESPONSES,
    NEMO_GYM,
    HARBOR,
    TRL,
    VERL_TEXT,
    AREAL,
    ROLL,
    RLLM,
)


def _require_format(name: str, value: object) -> Format:
    if not isinstance(value, Format):
        raise ContractError("it is no mismatch_probe.logs.Format")
    if value.name != name:
        raise ContractError(f"its name is {value.name!r}, and its entry point is called {name!r}")
    return value


FORMATS: Final[Registry[Format]] = Registry(
    "log format",
    "mismatch_probe.log_formats",
    {log_format.name: log_format for log_format in _BUILT_IN},
    _require_format,
)
"""By the name that `--format` gives."""

_MOST_TELLING_FIRST: Final = tuple(Holds)


def recognise(path: Path, name: str | None = None) -> Format:
    """The format of the file or the folder `path`; of several in a folder, the one that holds most. name: insists.

    Raises:
        NoLogError: none fits a file of the folder.
        UsageError: nothing is there, no format has this name, none fits the file, or two that hold as much do.
        PluginError: the plug-in of this name cannot be used.
    """
    if name is not None:
        return FORMATS.require(name, f"--format {name}")
    files, formats = files_of(path), FORMATS.usable()
    counts = Counter(key for file in files for key, candidate in formats.items() if candidate.fits(look_at(file)))
    if not counts:
        kind = UsageError if files == [path] else NoLogError
        names = ", ".join(formats)
        raise kind(f"{_why_none(path, files)} (known formats: {names}); name one with --format")
    best = min(_MOST_TELLING_FIRST.index(formats[fitting].holds) for fitting in counts)
    first, *others = [fitting for fitting in counts if formats[fitting].holds == _MOST_TELLING_FIRST[best]]
    if others:
        words = " and ".join(f"{formats[fitting].title} ({counts[fitting]} files)" for fitting in (first, *others))
        raise UsageError(f"{path} holds {words}; name one with --format {'|'.join((first, *others))}")
    return formats[first]


def _why_none(path: Path, files: list[Path]) -> str:
    if not files:
        return f"the folder {path} is empty, so it holds no log of a known format"
    if files != [path]:
        return f"none of the {len(files)} files below {path} is a log of a known format"
    why = look_at(path).why_other
    return f"the log {path} cannot be read: {why}" if why else f"{path} is not a log of a known format"
