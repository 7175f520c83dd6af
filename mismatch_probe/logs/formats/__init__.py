"""Every format that is read, one file each."""

from typing import Final

from mismatch_probe.logs.format import Format
from mismatch_probe.logs.formats.nemo_rl import NEMO_RL
from mismatch_probe.logs.formats.plain import PLAIN

FORMATS: Final[dict[str, Format]] = {known.name: known for known in (PLAIN, NEMO_RL)}
