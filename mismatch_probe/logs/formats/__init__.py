"""Every format that is read, one file each."""

from typing import Final

from mismatch_probe.logs.format import Format
from mismatch_probe.logs.formats.nemo_rl import NEMO_RL
from mismatch_probe.logs.formats.plain import PLAIN
from mismatch_probe.logs.formats.prime_rl import PRIME_RL
from mismatch_probe.logs.formats.slime import SLIME, SLIME_ROLLOUT

FORMATS: Final[dict[str, Format]] = {known.name: known for known in (PLAIN, NEMO_RL, PRIME_RL, SLIME, SLIME_ROLLOUT)}
