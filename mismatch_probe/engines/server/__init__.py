"""A server as mu: vLLM, SGLang, or any that takes and gives token ids, asked over HTTP."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import EngineProvider, EngineStart
from mismatch_probe.errors import UsageError

if TYPE_CHECKING:
    from mismatch_probe.engines.server.engine import ServerEngine

SMALLEST_TEMPERATURE: Final = 0.01
"""Servers raise a lower temperature to this, or take it for greedy."""


class Server(EngineProvider):
    """A server that runs already; the HTTP client is imported only once it is asked."""

    packages = ("httpx",)

    def start(self, how: EngineStart) -> "ServerEngine":
        from mismatch_probe.engines.server.engine import start_asking

        return start_asking(how)

    def read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        from mismatch_probe.engines.server.arguments import engine_arguments, known_arguments

        return engine_arguments(arguments, known_arguments())

    def default_arguments(self) -> Mapping[str, Any]:
        from mismatch_probe.engines.server.arguments import default_arguments

        return default_arguments()

    def check_limits(self, dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
        if not dtype.is_computed_in:
            raise UsageError(f"no server runs in {dtype}; say in which dtype it runs: url=...,dtype=bf16")
        if sampling.temperature < SMALLEST_TEMPERATURE:
            raise UsageError(
                f"--temperature {sampling.temperature} cannot be used: a server would silently sample at another; give "
                f"at least {SMALLEST_TEMPERATURE}"
            )
        if engine.prefill and sampling.temperature != 1:
            raise UsageError(
                f"prefill=true cannot be used with --temperature {sampling.temperature}: a server's prompt log-probs "
                "carry no temperature; leave prefill out, or sample at temperature 1"
            )

    def reach(self, engine: EngineSettings) -> int | None:
        from mismatch_probe.engines.server.arguments import ServerArguments
        from mismatch_probe.engines.server.client import contact
        from mismatch_probe.engines.server.connection import Connection

        arguments = ServerArguments(**engine.args)
        with Connection(arguments) as connection:
            return contact(connection, arguments, tries=2).max_model_len


SERVER: Final = Server()
