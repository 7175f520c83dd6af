"""The protocols that a server can be asked in, in the order in which they are looked for."""

from typing import Final, cast

from mismatch_probe.engines.server.answers import ServerProtocol
from mismatch_probe.engines.server.protocols.completions import Completions
from mismatch_probe.engines.server.protocols.sglang import SglangGenerate
from mismatch_probe.engines.server.protocols.vllm import VllmGenerate
from mismatch_probe.plugins import Registry, require_members


def _require_protocol(name: str, value: object) -> ServerProtocol:
    require_members(value, "ServerProtocol", "path", "server", "recognises", "software", "body", "answers")
    return cast(ServerProtocol, value)


PROTOCOLS: Final[Registry[ServerProtocol]] = Registry(
    "server protocol",
    "mismatch_probe.server_protocols",
    {"vllm": VllmGenerate(), "sglang": SglangGenerate(), "completions": Completions()},
    _require_protocol,
)
"""By the name that a side's `protocol` gives."""
