"""Ways to run the engine that are settings and no parts: each is a start of its own that replays the same responses."""

import os
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from mismatch_probe.config.localize import LocalizeSettings
from mismatch_probe.dtypes import SIXTEEN_BIT, short_name
from mismatch_probe.engines.base import start_engine
from mismatch_probe.localize.engine_job import replay_in_batches, try_plain
from mismatch_probe.localize.workspace import JobNotes, Workspace
from mismatch_probe.records.tables import read_table, sequences_of


@dataclass(frozen=True)
class Switch:
    """vLLM's arguments and environment variables, and whether it has them for CUDA alone."""

    args: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    cuda_only: bool = False


KV_CACHE: Final = "KV cache in the model's format"
SWITCHES: Final[dict[str, Switch]] = {
    "compiled graph": Switch({"enforce_eager": False}),
    "prefill in chunks of 64 tokens": Switch({"enable_chunked_prefill": True, "long_prefill_token_threshold": 64}),
    "batch-invariant kernels": Switch(environment={"VLLM_BATCH_INVARIANT": "1"}, cuda_only=True),
    "Triton's attention": Switch({"attention_backend": "TRITON_ATTN"}, cuda_only=True),
    KV_CACHE: Switch({"kv_cache_dtype": "auto"}),
}
"""By what a person calls them. Reading a prefix cache is none: prompt log-probs never do."""


def switches_of(settings: LocalizeSettings) -> list[str]:
    """Those that are asked for, and the KV cache's wherever it is kept in fewer bits: it is a part."""
    if not settings.interventions:
        return []
    asked = [switch for switch in SWITCHES if switch != KV_CACHE] if settings.switches else []
    return [*asked, *([KV_CACHE] if has_low_kv_cache(settings) else [])]


def has_low_kv_cache(settings: LocalizeSettings) -> bool:
    """Whether the engine is told to keep keys and values in fewer than 16 bits."""
    return short_name(settings.engine.args.get("kv_cache_dtype", "auto")) not in ("auto", *SIXTEEN_BIT)


def run_switch_job(workspace: Workspace, switch: str) -> JobNotes:
    """Call in a process of its own, whose environment it changes.

    Raises:
        EngineError: the engine cannot start so, or does not deliver.
    """
    chosen = SWITCHES[switch]
    if chosen.cuda_only and not torch.cuda.is_available():
        return JobNotes(left_out={switch: "vLLM has it for CUDA alone"})
    os.environ.update(chosen.environment)
    task = workspace.read_task()
    engine_settings = task.settings.as_comparison().engine
    sequences = sequences_of(read_table(workspace.rollouts))
    with start_engine(
        task.folder,
        task.settings.infer_dtype,
        engine_settings.model_copy(update={"args": {**engine_settings.args, **chosen.args}}),
        task.settings.sampling,
        max_model_len=task.max_model_len,
        num_sequences=len(sequences),
        trust_remote_code=task.settings.model.trust_remote_code,
        seed=task.settings.sampling.seed,
    ) as engine:
        trial = try_plain(workspace, "infer", sequences, lambda: replay_in_batches(engine, sequences), switch)
    return JobNotes(trials=[trial])
