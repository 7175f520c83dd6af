"""Ways to run the engine that are settings and no parts: each is a start of its own that replays the same responses."""

from typing import Any, Final

from mismatch_probe.engines.start import start_engine
from mismatch_probe.localize.engine_trials import replay_in_batches
from mismatch_probe.localize.trials import try_plain
from mismatch_probe.localize.workspace import JobNotes, Workspace
from mismatch_probe.records.rows import sequences_of
from mismatch_probe.records.tables import read_table

SWITCHES: Final[dict[str, dict[str, Any]]] = {
    "compiled graph": {"enforce_eager": False},
    "prefill in chunks of 64 tokens": {"enable_chunked_prefill": True, "long_prefill_token_threshold": 64},
}
"""Engine arguments by what a person calls them. Reading a prefix cache is none: prompt log-probs never do."""


def run_switch_job(workspace: Workspace, switch: str) -> JobNotes:
    """
    Raises:
        EngineError: the engine cannot start so, or does not deliver.
    """
    task = workspace.read_task()
    engine_settings = task.settings.as_comparison().engine
    sequences = sequences_of(read_table(workspace.rollouts))
    with start_engine(
        task.folder,
        task.settings.infer_dtype,
        engine_settings.model_copy(update={"args": {**engine_settings.args, **SWITCHES[switch]}}),
        task.settings.sampling,
        max_model_len=task.max_model_len,
        trust_remote_code=task.settings.model.trust_remote_code,
        seed=task.settings.sampling.seed,
    ) as engine:
        trial = try_plain(workspace, "infer", sequences, lambda: replay_in_batches(engine, sequences), switch)
    return JobNotes(trials=[trial])
