"""A part of a running vLLM in FP32, asked of its workers."""

from collections.abc import Iterator
from contextlib import contextmanager

from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.vllm.engine import VllmEngine
from mismatch_probe.engines.vllm.fp32_hooks import LM_HEAD, ROUTER


def engine_parts(engine: Engine) -> list[str]:
    """What can be computed in FP32 in this engine."""
    assert isinstance(engine, VllmEngine)
    routers = engine.llm.collective_rpc("probe_num_routers")
    return [LM_HEAD, ROUTER] if any(routers) else [LM_HEAD]


@contextmanager
def engine_part_in_fp32(engine: Engine, part: str) -> Iterator[int]:
    """Compute `part` in FP32 inside; gives the bytes of FP32 weights that it keeps: none, each pass makes them."""
    assert isinstance(engine, VllmEngine)
    engine.llm.collective_rpc("probe_raise", args=(part,))
    try:
        yield 0
    finally:
        engine.llm.collective_rpc("probe_lower")
