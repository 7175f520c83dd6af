"""The jobs: both sides with one part in FP32 or one setting changed, and the walk of the FP32 reference over both.

The engine's job runs first. The training path's scores and records pi on the same ids.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedModel

from mismatch_probe.compare.plan import sample_requests
from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import PairSide
from mismatch_probe.dtypes import COMPUTED_IN, Dtype, short_name
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.start import start_engine
from mismatch_probe.engines.vllm.inside import engine_part_in_fp32, engine_parts
from mismatch_probe.engines.vllm.inside import record_activations as record_engine
from mismatch_probe.engines.vllm.outputs import infer_names
from mismatch_probe.localize.workspace import JobInput, JobNotes, TrialNotes, Workspace, activation_batches
from mismatch_probe.records.activations import is_layer
from mismatch_probe.records.findings import Intervention, Interventions
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.records.tables import (
    leg_table,
    prompts_of,
    read_table,
    rollouts_table,
    sequences_of,
    write_sums,
    write_table,
)
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.inside.fp32_parts import ATTENTION, EVERYTHING, model_part_in_fp32, model_parts
from mismatch_probe.training_path.inside.recording import record_activations as record_training
from mismatch_probe.training_path.inside.reference_walk import ReferenceWalk
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.precision import load_reference_model, load_training_model, undivided_modules
from mismatch_probe.training_path.scorer import Scorer

TOGETHER: Final = "all parts together"
_WHOLE: Final = ("everything", TOGETHER)
"""What is no part among those that are in FP32 together; nor is a single layer."""
ONE_AT_A_TIME: Final = "one response at a time"
ReadLeg = Callable[[str], Floats]


def judge_interventions(
    trials: Sequence[TrialNotes], estimator: Estimator, read: ReadLeg, left_out: dict[str, str]
) -> Interventions:
    """`read` gives the log-probs [T] of a leg by its name; a trial without a part is its side as it is.

    A part of the engine is compared with the unchanged training path, and the reverse; the difference between the
    engine's decoding and its replay is on both sides of each contrast. A part tried on both sides is also in FP32 on
    both.
    """
    legs = {(trial.side, trial.part): trial for trial in trials}
    log_pi, log_mu = read("train"), read("infer")
    judgements = []
    for (side, part), trial in legs.items():
        if not part:
            continue
        trial_leg, plain = read(trial.leg), legs[side, ""]
        error_after = trial_leg - log_mu if side == "train" else log_pi - trial_leg
        error_before = read(plain.leg) - log_mu if side == "train" else log_pi - read(plain.leg)
        judgements.append(_judge(part, side, [trial], [plain], estimator, error_after, error_before))
        if side == "train" and ("infer", part) in legs:
            other, other_plain = legs["infer", part], legs["infer", ""]
            error_after, error_before = trial_leg - read(other.leg), read(plain.leg) - read(other_plain.leg)
            judgements.append(
                _judge(part, "both", [trial, other], [plain, other_plain], estimator, error_after, error_before)
            )
    parts = [
        trial for trial in judgements if trial.side == "train" and trial.part not in _WHOLE and not is_layer(trial.part)
    ]
    return Interventions(
        ranked=sorted(
            (trial for trial in judgements if trial.part != TOGETHER), key=lambda trial: -trial.removed.value
        ),
        together=next((trial for trial in judgements if trial.part == TOGETHER), None),
        sum_of_removed=sum(part.removed.value for part in parts) if parts else None,
        left_out=left_out,
    )


def _judge(
    part: str,
    side: Literal["infer", "train", "both"],
    trials: Sequence[TrialNotes],
    plain: Sequence[TrialNotes],
    estimator: Estimator,
    error_after: Floats,
    error_before: Floats,
) -> Intervention:
    """From the log-ratios [T] with the part in FP32 and without."""
    terms_after, terms_before = k3_terms(error_after), k3_terms(error_before)
    kl = estimator.mean(terms_after, "token", Scale.POSITIVE)
    totals = [estimator.totals(terms, "token") for terms in (terms_after, terms_before)]
    removed_share = estimator.smooth(lambda with_part, without: 1 - with_part / without, totals, "token")
    assert kl is not None
    assert removed_share is not None, "sides that agree bit for bit are not tried"
    return Intervention(
        part=part,
        side=side,
        kl_k3=kl,
        removed=_at_most_all(removed_share),
        slower=sum(trial.seconds for trial in trials) / sum(trial.seconds for trial in plain) - 1,
        extra_bytes=sum(trial.extra_bytes for trial in trials),
    )


def _at_most_all(removed_share: Estimate) -> Estimate:
    """No part removes more than there is, so neither does its interval."""
    return removed_share if removed_share.high is None else replace(removed_share, high=min(removed_share.high, 1.0))


ScoreCall = Callable[[], list[ScoredSequence]]
InFP32 = Callable[[], AbstractContextManager[int]]
NOT_16_BIT: Final = "its weights are not 16-bit, so it has no part to compute in FP32"
_REPEATS: Final = 2


def try_parts(
    workspace: Workspace,
    side: PairSide,
    sequences: Sequence[TokenSequence],
    score: ScoreCall,
    parts: Mapping[str, InFP32],
    tell: Callable[[str], None],
) -> list[TrialNotes]:
    """Score with nothing in FP32, then with each part, and write a leg for each; `tell` receives how far that is."""
    tell("scoring with nothing in FP32")
    trials = [try_plain(workspace, side, sequences, score)]
    for number, (name, part) in enumerate(parts.items(), 1):
        tell(f"part {number} of {len(parts)} in FP32: {name}")
        trials.append(_try(workspace, side, sequences, score, name, part))
    return trials


def try_plain(
    workspace: Workspace, side: PairSide, sequences: Sequence[TokenSequence], score: ScoreCall, name: str = ""
) -> TrialNotes:
    """Score with no part in FP32, as the side is or, with a name, as `score` runs it otherwise."""
    return _try(workspace, side, sequences, score, name, lambda: nullcontext(0))


def _try(
    workspace: Workspace,
    side: PairSide,
    sequences: Sequence[TokenSequence],
    score: ScoreCall,
    part: str,
    in_fp32: InFP32,
) -> TrialNotes:
    with in_fp32() as extra_bytes:
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            scores = score()
            seconds.append(time.perf_counter() - start)
    notes = TrialNotes(part=part, side=side, seconds=min(seconds), extra_bytes=extra_bytes)
    write_table(workspace.leg(notes.leg), leg_table(sequences, scores))
    return notes


_BATCH_SEQUENCES: Final = 64


def try_engine_parts(
    workspace: Workspace, engine: Engine, dtype: Dtype, sequences: Sequence[TokenSequence], tell: Callable[[str], None]
) -> list[TrialNotes]:
    """Replay with each part in FP32, of a 16-bit engine, and with every response in a pass of its own."""
    names = engine_parts(engine) if dtype.rounds_coarsely else []
    parts: dict[str, InFP32] = {name: partial(engine_part_in_fp32, engine, name) for name in names}
    trials = try_parts(workspace, "infer", sequences, partial(replay_in_batches, engine, sequences), parts, tell)
    score_alone = partial(replay_in_batches, engine, sequences, size=1)
    tell("each response alone")
    return [*trials, try_plain(workspace, "infer", sequences, score_alone, ONE_AT_A_TIME)]


def replay_in_batches(
    engine: Engine, sequences: Sequence[TokenSequence], *, size: int = _BATCH_SEQUENCES
) -> list[ScoredSequence]:
    batches = (sequences[start : start + size] for start in range(0, len(sequences), size))
    return [scores for batch in batches for scores in engine.replay(batch)]


def run_engine_job(workspace: Workspace, tell: Callable[[str], None]) -> JobNotes:
    """`tell` receives how far it is."""
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
        start = time.perf_counter()
        engine.on_finished = lambda num_done, total: tell(f"{num_done} of {total} responses sampled")
        responses = engine.sample(requests, settings.sampling)
        engine.on_finished = None
        seconds["sample"] = time.perf_counter() - start
        write_table(workspace.rollouts, rollouts_table(requests, responses, mu.sampler))
        sequences = [response.sequence for response in responses]
        write_table(workspace.leg("infer"), leg_table(sequences, [response.scores for response in responses]))
        trials = try_engine_parts(workspace, engine, dtype, sequences, tell) if settings.interventions else []
        tell("recording what its layers compute")
        start = time.perf_counter()
        layout, _ = record_engine(
            engine, activation_batches(sequences, task), workspace.activations, modules=settings.modules
        )
        seconds["record infer"] = time.perf_counter() - start
    layout = {"layer_paths": layout["layer_paths"], "names": infer_names(layout)}
    return JobNotes(
        seconds=seconds,
        layout=layout,
        trials=trials,
        stored_bytes=workspace.activations.num_bytes(),
        left_out={} if dtype.rounds_coarsely else {"engine": NOT_16_BIT},
    )


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
    switches = [switch for switch in SWITCHES if switch != KV_CACHE] if settings.switches else []
    return [*switches, *([KV_CACHE] if has_low_kv_cache(settings) else [])]


def has_low_kv_cache(settings: LocalizeSettings) -> bool:
    """Whether the engine's settings keep keys and values in fewer than 16 bits."""
    return short_name(settings.engine.args.get("kv_cache_dtype", "auto")) not in ("auto", *COMPUTED_IN)


def run_switch_job(workspace: Workspace, switch: str) -> JobNotes:
    """Call in a process of its own, whose environment it changes."""
    switch_settings = SWITCHES[switch]
    if switch_settings.cuda_only and not torch.cuda.is_available():
        return JobNotes(left_out={switch: "vLLM has it for CUDA alone"})
    os.environ.update(switch_settings.environment)
    task = workspace.read_task()
    engine_settings = task.settings.as_comparison().engine
    sequences = sequences_of(read_table(workspace.rollouts))
    with start_engine(
        task.folder,
        task.settings.infer_dtype,
        engine_settings.model_copy(update={"args": {**engine_settings.args, **switch_settings.args}}),
        task.settings.sampling,
        max_model_len=task.max_model_len,
        num_sequences=len(sequences),
        trust_remote_code=task.settings.model.trust_remote_code,
        seed=task.settings.sampling.seed,
    ) as engine:
        trial = try_plain(workspace, "infer", sequences, lambda: replay_in_batches(engine, sequences), switch)
    return JobNotes(trials=[trial])


def run_training_job(workspace: Workspace, tell: Callable[[str], None]) -> JobNotes:
    """`tell` receives how far it is."""
    task = workspace.read_task()
    sequences = sequences_of(read_table(workspace.rollouts))
    notes = JobNotes()
    _score_and_record(workspace, task, sequences, notes, tell)
    _walk(workspace, task, sequences, notes, tell)
    notes.stored_bytes = workspace.activations.num_bytes()
    return notes


def _score_and_record(
    workspace: Workspace, task: JobInput, sequences: list[TokenSequence], notes: JobNotes, tell: Callable[[str], None]
) -> None:
    """pi scores every response, plainly and with parts in FP32; what is looked into is recorded besides."""
    settings = task.settings
    folder = Path(task.folder)
    tell(f"loading the model in {settings.train_dtype}")
    model, arithmetic = load_training_model(
        folder,
        settings.train_dtype,
        settings.training,
        choose_device(settings.training.device),
        trust_remote_code=settings.model.trust_remote_code,
    )
    batches = plan_batches([sequence.num_tokens for sequence in sequences], settings.training.batch_tokens)
    with Scorer(
        folder, model, arithmetic, settings.training, temperature=1.0, weights_dtype=settings.train_dtype
    ) as scorer:

        def score() -> list[ScoredSequence]:
            batches_of_scores = (scorer.score_batch([sequences[row] for row in rows]) for rows in batches)
            of_id = {scores.id: scores for batch in batches_of_scores for scores in batch}
            return [of_id[sequence.id] for sequence in sequences]

        tell("scoring the responses")
        write_table(workspace.leg("train"), leg_table(sequences, score()))
        if settings.interventions:
            try_training_parts(workspace, settings, model, sequences, score, notes, tell)
        tell("recording what its layers compute")
        start = time.perf_counter()
        batches_to_record = activation_batches(sequences, task)
        record_training(model, arithmetic, batches_to_record, workspace.activations, modules=settings.modules)
        notes.seconds["record train"] = time.perf_counter() - start


def _walk(
    workspace: Workspace, task: JobInput, sequences: list[TokenSequence], notes: JobNotes, tell: Callable[[str], None]
) -> None:
    settings = task.settings
    tell("loading the FP32 reference")
    model, arithmetic, _ = load_reference_model(
        Path(task.folder),
        Dtype.FP32,
        settings.training,
        choose_device(settings.training.device),
        rounded_to=None,
        trust_remote_code=settings.model.trust_remote_code,
    )
    tell("holding both sides against the FP32 reference")
    walk = ReferenceWalk(model, arithmetic, workspace.activations, modules=settings.modules)
    start = time.perf_counter()
    walk.run(activation_batches(sequences, task))
    notes.seconds["walk reference"] = time.perf_counter() - start
    write_sums(workspace.sums, walk.places(), walk.routers())
    layers = undivided_modules(model)
    notes.layout = {"layer_paths": [path for path, module in model.named_modules() if module in layers]}


def try_training_parts(
    workspace: Workspace,
    settings: LocalizeSettings,
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    score: ScoreCall,
    notes: JobNotes,
    tell: Callable[[str], None],
) -> None:
    """Try every part, every layer, all parts together, and the whole model; `notes` list what cannot be tried."""
    if not settings.train_dtype.rounds_coarsely or settings.training.precision not in ("weights", "to"):
        notes.left_out["training path"] = NOT_16_BIT
        return
    names = model_parts(model)
    if settings.training.attention == "flash_attention_2":
        names.remove(ATTENTION)
        notes.left_out["attention of the training path"] = "flash_attention_2 does not compute in FP32"
    parts: dict[str, InFP32] = {name: partial(model_part_in_fp32, model, name) for name in [*names, EVERYTHING]}
    parts[TOGETHER] = partial(_all_in_fp32, model, [name for name in names if not is_layer(name)])
    notes.trials += try_parts(workspace, "train", sequences, score, parts, tell)


@contextmanager
def _all_in_fp32(model: PreTrainedModel, parts: Sequence[str]) -> Iterator[int]:
    with ExitStack() as stack:
        yield sum(stack.enter_context(model_part_in_fp32(model, part)) for part in parts)
