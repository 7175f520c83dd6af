"""vLLM as mu, in process."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.errors import INSTALL_ENGINES, MissingExtra

if TYPE_CHECKING:
    from mismatch_probe.engines.vllm.engine import VllmEngine

PACKAGES: Final = ("vllm",)


def start(*args: Any, **settings: Any) -> "VllmEngine":
    """`engine.start_vllm`, reached only when vLLM is installed.

    Raises:
        MissingExtra: it is not.
    """
    if find_spec("vllm") is None:
        raise MissingExtra(f"vLLM is not installed, and sampling needs it; run {INSTALL_ENGINES}")
    from mismatch_probe.engines.vllm.engine import start_vllm

    return start_vllm(*args, **settings)
