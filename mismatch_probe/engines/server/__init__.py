"""A server as mu: vLLM, SGLang, or any that takes and gives token ids, asked over HTTP."""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mismatch_probe.engines.server.engine import ServerEngine

PACKAGES: Final = ("httpx",)


def start(*args: Any, **settings: Any) -> "ServerEngine":
    """`engine.start_asking`; only then is the HTTP client loaded."""
    from mismatch_probe.engines.server.engine import start_asking

    return start_asking(*args, **settings)
