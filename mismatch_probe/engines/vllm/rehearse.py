"""vLLM builds its configuration and goes no further: what its start would refuse."""

from importlib import import_module
from typing import Any

from mismatch_probe.children.messages import Send, described
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.vllm.failures import refused_settings
from mismatch_probe.engines.vllm.launch import plan_launch
from mismatch_probe.errors import MismatchProbeError


class _Configured(Exception):  # noqa: N818 - the good end
    pass


class _NoEngine:
    """Stands where `vllm.LLM` finds its engine."""

    @staticmethod
    def from_engine_args(engine_args: Any, usage_context: Any, **_: Any) -> None:
        engine_args.create_engine_config(usage_context)
        raise _Configured


def rehearse(
    checkpoint: str,
    dtype: Dtype,
    engine: EngineSettings,
    sampling: SamplingSettings,
    *,
    max_model_len: int,
    trust_remote_code: bool,
) -> None:
    """Take `vllm.LLM` as far as its whole configuration. Takes over the process: for one of its own.

    Raises:
        MismatchProbeError: what the start would raise up to there.
    """
    launch = plan_launch(
        checkpoint, dtype, engine, sampling, max_model_len=max_model_len, trust_remote_code=trust_remote_code
    )
    entry: Any = import_module("vllm.entrypoints.llm")
    real, entry.LLMEngine = entry.LLMEngine, _NoEngine
    try:
        entry.LLM(**launch.arguments)
    except _Configured:
        return
    except Exception as error:
        raise refused_settings(error, checkpoint, dtype, engine.args) from error
    finally:
        entry.LLMEngine = real


def rehearse_requested(send: Send, request: dict[str, Any]) -> list[dict[str, str] | None]:
    """Rehearse every start of a request that came as JSON values; what each would raise, described."""
    starts, sampling = request.pop("starts"), SamplingSettings(**request.pop("sampling"))
    failures: list[dict[str, str] | None] = []
    for checkpoint, dtype, engine in starts:
        try:
            rehearse(checkpoint, Dtype.parse(dtype), EngineSettings(**engine), sampling, **request)
            failures.append(None)
        except MismatchProbeError as error:
            failures.append(described(error, "configuring vllm"))
    return failures
