"""Every format that is read, one file each."""

from typing import Final

from mismatch_probe.logs.format import Format
from mismatch_probe.logs.formats.miles import MILES, MILES_TRAIN
from mismatch_probe.logs.formats.nemo_rl import NEMO_RL
from mismatch_probe.logs.formats.open_instruct import OPEN_INSTRUCT
from mismatch_probe.logs.formats.plain import PLAIN
from mismatch_probe.logs.formats.prime_rl import PRIME_RL
from mismatch_probe.logs.formats.prime_rl_traces import PRIME_RL_TRACES
from mismatch_probe.logs.formats.responses import SGLANG_RESPONSES, VLLM_RESPONSES
from mismatch_probe.logs.formats.skyrl import SKYRL
from mismatch_probe.logs.formats.slime import SLIME, SLIME_ROLLOUT
from mismatch_probe.logs.formats.texts import AREAL, RLLM, ROLL, TRL, VERL_TEXT
from mismatch_probe.logs.formats.tinker import TINKER
from mismatch_probe.logs.formats.verl import VERL, VERL_PROTOCOL
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
