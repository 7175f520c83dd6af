"""The protocols that a server can be asked in, in the order in which they are looked for."""

from typing import Final

from mismatch_probe.engines.server.answers import Protocol
from mismatch_probe.engines.server.protocols.completions import Completions
from mismatch_probe.engines.server.protocols.sglang import SglangGenerate
from mismatch_probe.engines.server.protocols.vllm import VllmGenerate

PROTOCOLS: Final[tuple[Protocol, ...]] = (VllmGenerate(), SglangGenerate(), Completions())
