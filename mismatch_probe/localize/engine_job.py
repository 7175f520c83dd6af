"""The engine's job: sample responses, then replay some of them with hooks inside the engine."""

import time
from collections.abc import Callable

from mismatch_probe.compare.plan import sample_requests
from mismatch_probe.engines.start import start_engine
from mismatch_probe.engines.vllm.activations import record_activations
from mismatch_probe.engines.vllm.recorded import infer_names
from mismatch_probe.localize.engine_trials import try_engine_parts
from mismatch_probe.localize.looked_into import activation_batches
from mismatch_probe.localize.trials import NOT_16_BIT
from mismatch_probe.localize.workspace import JobNotes, Workspace
from mismatch_probe.records.rows import leg_table, prompts_of, rollouts_table
from mismatch_probe.records.tables import read_table, write_table


def run_engine_job(workspace: Workspace, tell: Callable[[str], None]) -> JobNotes:
    """`tell` hears how far it is.

    Raises:
        EngineError: the engine cannot start, has several workers, or does not deliver.
        OutOfMemory: it does not fit.
        StorageError: the disk refused.
    """
    task = workspace.read_task()
    settings = task.settings
    comparison = settings.as_comparison()
    mu = comparison.infer_sides[0]
    requests = sample_requests(prompts_of(read_table(workspace.prompts)), comparison.sampling, mu)
    dtype = settings.infer_dtype
    seconds = {}
    tell("starting vLLM")
    with start_engine(
        task.folder,
        settings.infer_dtype,
        comparison.engine,
        settings.sampling,
        max_model_len=task.max_model_len,
        num_sequences=len(requests),
        trust_remote_code=settings.model.trust_remote_code,
        seed=settings.sampling.seed,
    ) as engine:
        begun = time.perf_counter()
        engine.on_finished = lambda done, of: tell(f"{done} of {of} responses sampled")
        sampled = engine.sample(requests, settings.sampling)
        engine.on_finished = None
        seconds["sample"] = time.perf_counter() - begun
        write_table(workspace.rollouts, rollouts_table(requests, sampled, mu.sampler))
        sequences = [response.sequence for response in sampled]
        write_table(workspace.leg("infer"), leg_table(sequences, [response.scores for response in sampled]))
        trials = try_engine_parts(workspace, engine, dtype, sequences, tell) if settings.interventions else []
        tell("recording what its layers compute")
        begun = time.perf_counter()
        layout, _ = record_activations(
            engine, activation_batches(sequences, task), workspace.activations, modules=settings.modules
        )
        seconds["record infer"] = time.perf_counter() - begun
    layout = {"layer_paths": layout["layer_paths"], "names": infer_names(layout)}
    return JobNotes(
        seconds=seconds,
        layout=layout,
        trials=trials,
        stored_bytes=workspace.activations.num_bytes(),
        left_out={} if dtype.is_16_bit else {"engine": NOT_16_BIT},
    )
