"""vLLM as mu, in process."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.children.servers import Preload
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import EngineProvider, EngineStart
from mismatch_probe.errors import INSTALL_ENGINES, MissingExtra

if TYPE_CHECKING:
    from mismatch_probe.engines.vllm.engine import VllmEngine


class Vllm(EngineProvider):
    """vLLM, imported only once it is started or rehearsed."""

    packages = ("vllm",)
    takes_images = True
    preload: Preload = "engine"

    def start(self, how: EngineStart) -> "VllmEngine":
        if find_spec("vllm") is None:
            raise MissingExtra(f"vLLM is not installed, and sampling needs it; run {INSTALL_ENGINES}")
        from mismatch_probe.engines.vllm.engine import start_vllm

        return start_vllm(how)

    def read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        from mismatch_probe.engines.vllm.arguments import engine_arguments, known_arguments

        return engine_arguments(arguments, known_arguments())

    def default_arguments(self) -> Mapping[str, Any]:
        from mismatch_probe.engines.vllm.arguments import default_arguments

        return default_arguments()

    def check_limits(self, dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
        from mismatch_probe.engines.vllm.arguments import check_limits

        check_limits(dtype, sampling, engine)

    def rehearse(self, how: EngineStart) -> None:
        from mismatch_probe.engines.vllm.launch import rehearse

        rehearse(how)


VLLM: Final = Vllm()
