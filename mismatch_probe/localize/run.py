"""The localization, job after job, each in a process of its own, and what comes of it.

Each side has a process of its own: vLLM binds the threads of the one it runs in, and memory is given back at its end.
Sums at every place become errors with intervals, and log-probs the token KL that they explain.
"""

import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from mismatch_probe import __version__
from mismatch_probe.children import start
from mismatch_probe.children.messages import Send
from mismatch_probe.compare.preparation import Preparation, prepare
from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import PairSide
from mismatch_probe.engines.start import with_typed_arguments
from mismatch_probe.errors import BrokenRecord, EngineError, UsageError
from mismatch_probe.localize.jobs import SWITCHES, has_low_kv_cache, judge_interventions, switches_of
from mismatch_probe.localize.suspects import PlaceNames, channel_ratio, find_suspects
from mismatch_probe.localize.workspace import (
    ENGINE,
    TRAINING,
    JobInput,
    JobNotes,
    Workspace,
    logit_rows,
    looked_into,
    max_stored_tokens,
)
from mismatch_probe.notation import write_many
from mismatch_probe.provenance import checkpoint, environment
from mismatch_probe.records.activations import BLOCK, ErrorSums, PlaceSums, RouterSums, SideSums
from mismatch_probe.records.findings import Interventions, Localization, PlaceError, RouterDecisions, SideError
from mismatch_probe.records.manifest import ModelIdentity
from mismatch_probe.records.tables import prompts_table, read_sums, read_table, sequences_of, write_table
from mismatch_probe.stats.estimator import Estimator, map_estimate
from mismatch_probe.stats.intervals import Interval, Scale, ratio
from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Sequences, is_usable

SIDES: Final[tuple[PairSide, PairSide]] = ("infer", "train")


def estimator_of(rollouts: pa.Table, counts: Sequence[int], level: float) -> Estimator:
    """Over the first `len(counts)` responses, with so many tokens each; samples of one prompt are one cluster."""
    prompts = rollouts["prompt_id"].to_pylist()[: len(counts)]
    clusters = np.unique(prompts, return_inverse=True)[1]
    return Estimator(Sequences.of_lengths(counts, clusters), level)


def token_kl(estimator: Estimator, log_pi: Floats, log_mu: Floats) -> tuple[Estimate | None, Estimate | None]:
    """k3 and mean abs(d) of response tokens [T]."""
    diff = log_pi - log_mu
    return estimator.mean(k3_terms(diff), "token", Scale.POSITIVE), estimator.mean(
        np.abs(diff), "token", Scale.POSITIVE
    )


def place_errors(
    places: Sequence[PlaceSums], estimator: Estimator, names: PlaceNames, settings: LocalizeSettings
) -> list[PlaceError]:
    """
    Raises:
        BrokenRecord: a side's activations are not finite, so there is no error to measure.
    """
    errors = []
    for place in places:
        _require_finite(place, names, settings)
        by_number = place.infer.own_by_number, place.train.own_by_number
        worst = channel_ratio(*by_number, settings.infer_dtype, settings.train_dtype)
        errors.append(
            PlaceError(
                layer=place.layer,
                place=place.place,
                train_name=names.train(place.layer, place.place),
                infer_name=names.infer(place.layer, place.place),
                infer=_side_error(place.infer, estimator),
                train=_side_error(place.train, estimator),
                between=_relative(place.between),
                own_ratio=worst.times,
                own_ratio_channel=worst.channel,
                own_ratio_side=worst.side,
            )
        )
    return errors


def router_decisions(routers: Sequence[RouterSums], estimator: Estimator) -> list[RouterDecisions]:
    return [
        RouterDecisions(
            layer=router.layer,
            **{
                name: estimator.share_of_totals(
                    estimator.totals(getattr(router, name), "sequence"),
                    estimator.totals(router.tokens, "sequence"),
                    "token",
                )
                for name in ("infer", "train", "sides")
            },
        )
        for router in routers
    ]


def enters(blocks: Sequence[PlaceError]) -> dict[PairSide, str]:
    """The block of each side that adds most, relative to the stream it adds to."""
    return {side: max(blocks, key=lambda block: getattr(block, side).own.value).train_name for side in SIDES}


def first_difference(errors: Sequence[PlaceError]) -> str | None:
    """The first place in the order of the pass where the sides are not the same bit for bit."""
    return next((error.train_name for error in errors if error.between > 0), None)


def _require_finite(place: PlaceSums, names: PlaceNames, settings: LocalizeSettings) -> None:
    for side, who, dtype in (
        (place.infer, "the engine", settings.infer_dtype),
        (place.train, "the training path", settings.train_dtype),
    ):
        if not np.isfinite(side.total.error_squares).all():
            raise BrokenRecord(
                f"what {who} computes at {names.train(place.layer, place.place)} is not finite in {dtype}; "
                "`mismatch-probe headroom` says what does not fit, and another dtype fixes it"
            )


def _side_error(side: SideSums, estimator: Estimator) -> SideError:
    own = side.own_by_number
    return SideError(
        total=_relative_estimate(side.total, estimator),
        own=_relative_estimate(side.own, estimator),
        scale=_ratio_of(own.sequence_along, own.sequence_targets, Scale.SIGNED, estimator),
        scale_of_extra_rounding=float(own.extra_along[0] / own.targets.sum()) if own.targets.any() else 0.0,
        cosine=_cosine(side.total),
        largest=float(side.total.largest[0]),
    )


def _relative_estimate(sums: ErrorSums, estimator: Estimator) -> Estimate:
    return map_estimate(_ratio_of(sums.error_squares, sums.tokens, Scale.POSITIVE, estimator), math.sqrt)


def _ratio_of(numerator: Floats, denominator: Floats, scale: Scale, estimator: Estimator) -> Estimate:
    """0 where the denominator is."""
    columns = [_clusters(numerator, estimator), _clusters(denominator, estimator)]
    estimate = estimator.smooth(ratio, columns, "token", scale)
    return estimate if estimate is not None else estimator.present(Interval(0.0, 0.0, 0.0), "token")


def _clusters(values: Floats, estimator: Estimator) -> Floats:
    return estimator.totals(values, "sequence")


def _relative(sums: ErrorSums) -> float:
    tokens = float(sums.tokens.sum())
    return float(np.sqrt(sums.error_squares.sum() / tokens)) if tokens else 0.0


def _cosine(sums: ErrorSums) -> float:
    """From |a|, |b| and (a - b) . b."""
    target, side = sums.target_squares.sum(), sums.side_squares.sum()
    dot = sums.along.sum() + target
    return float(dot / np.sqrt(target * side)) if target and side else 0.0


_WHEN_KILLED: Final = "lower --num-prompts or --max-new-tokens"


def run_job(workspace: Workspace, job: str, tell: Callable[[str], None]) -> JobNotes:
    """Run a job to its end; `tell` receives how far it is."""
    child = start.Job(
        name=f"the {job} job",
        function=run_noted,
        arguments=(job, str(workspace.path.absolute())),
        preload="training" if job == TRAINING else "engine",
        when_killed=_WHEN_KILLED,
        log=workspace.log(job),
    )
    return JobNotes.model_validate(start.run(child, tell))


def run_noted(send: Send, job: str, folder: str) -> dict[str, Any]:
    """The job's notes as JSON values: what the child process does."""
    notes = _run(job, Workspace(Path(folder)), send)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return notes.model_copy(update={"peak_memory_bytes": peak}).model_dump(mode="json")


def _run(job: str, workspace: Workspace, tell: Callable[[str], None]) -> JobNotes:
    if job == ENGINE:
        from mismatch_probe.localize.jobs import run_engine_job

        return run_engine_job(workspace, tell)
    if job == TRAINING:
        from mismatch_probe.localize.jobs import run_training_job

        return run_training_job(workspace, tell)
    from mismatch_probe.localize.jobs import run_switch_job

    return run_switch_job(workspace, job)


StageProgressCallback = Callable[[str, int, int, str], None]
"""Hears what is done, which stage that is, from 1, of how many, and how far it is."""

_BACKEND: Final = "distributed_executor_backend"
_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def localize(settings: LocalizeSettings, folder: Path, tell: StageProgressCallback) -> Localization:
    """Where do the two sides part? Working files go to `folder`; `tell` receives each job, and how far it is.

    Raises:
        UsageError: the checkpoint, the prompts or the settings cannot be used.
        EngineError: a side cannot start, or cannot be looked into.
    """
    if settings.engine.name != "vllm":
        raise UsageError(
            f"localize looks inside vLLM, and engine.name is {settings.engine.name}; leave it out, or use compare"
        )
    settings = settings.model_copy(update={"engine": with_typed_arguments(settings.engine, settings.engine.name)})
    _require_one_worker(settings.engine.args)
    preparation = prepare(settings.as_comparison())
    _require_text_alone(preparation.manifest.model)
    workspace = Workspace(folder)
    workspace.activations.root.mkdir(parents=True)
    write_table(workspace.prompts, prompts_table(preparation.prompts))
    workspace.write_task(_task(settings, preparation))
    notes: dict[str, JobNotes] = {}
    seconds: dict[str, float] = {}
    jobs = _jobs(settings, len(preparation.prompts))
    for number, (job, doing) in enumerate(jobs.items(), 1):
        tell(doing, number, len(jobs), "")
        start = time.perf_counter()
        try:
            notes[job] = run_job(workspace, job, partial(tell, doing, number, len(jobs)))
        except EngineError as error:
            if job not in SWITCHES:
                raise
            notes[job] = JobNotes(left_out={job: str(error)})
        seconds = {**seconds, **notes[job].seconds, f"{job} in all": time.perf_counter() - start}
    return _summary(settings, preparation, workspace, notes, seconds)


def _require_one_worker(args: Mapping[str, Any]) -> None:
    """What a start of several workers, which takes a minute, would end in."""
    several = [name for name in _SIZES if (args.get(name) or 1) > 1]
    if args.get(_BACKEND) == "external_launcher":
        several.insert(0, _BACKEND)
    if several:
        flags, divide, them = " and ".join(f"--vllm.{name}" for name in several), "divide", "them"
        if len(several) == 1:
            divide, them = "divides", "it"
        raise UsageError(
            f"localize looks inside one vLLM worker, and {flags} {divide} the engine over several; leave {them} out"
        )


def _require_text_alone(model: ModelIdentity) -> None:
    if model.sees_too:
        raise UsageError(
            f"localize looks into models of text alone, and {model.name} is a {model.architecture}, which sees or "
            "hears too; compare measures such models"
        )


def _jobs(settings: LocalizeSettings, num_prompts: int) -> dict[str, str]:
    """Each job and what it does, in order."""
    jobs = {
        ENGINE: f"vLLM in {settings.infer_dtype}: samples {write_many(num_prompts, 'response')} and is recorded",
        TRAINING: f"the training path in {settings.train_dtype} and FP32: the same token ids",
    }
    return jobs | {switch: f"vLLM with {switch}: the same token ids" for switch in switches_of(settings)}


def _task(settings: LocalizeSettings, preparation: Preparation) -> JobInput:
    model = preparation.manifest.model
    config = checkpoint.read_config(Path(model.folder))
    return JobInput(
        settings=settings,
        folder=model.folder,
        max_model_len=preparation.longest_sequence,
        max_stored_tokens=max_stored_tokens(
            config,
            dtypes=(settings.infer_dtype, settings.train_dtype),
            modules=settings.modules,
            most_bytes=settings.most_stored_bytes,
        ),
        logit_rows=logit_rows(config),
    )


def _summary(
    settings: LocalizeSettings,
    preparation: Preparation,
    workspace: Workspace,
    notes: dict[str, JobNotes],
    seconds: dict[str, float],
) -> Localization:
    rollouts = read_table(workspace.rollouts)
    sequences = sequences_of(rollouts)
    chosen_sequences = looked_into(sequences, workspace.read_task().max_stored_tokens)
    estimator = estimator_of(rollouts, [len(sequence.token_ids) for sequence in sequences], settings.confidence)
    inside = estimator_of(rollouts, [sequence.num_tokens - 1 for sequence in chosen_sequences], settings.confidence)
    names = PlaceNames.of(notes[TRAINING].layout, notes[ENGINE].layout)
    places, routers = read_sums(workspace.sums)
    errors = place_errors(places, inside, names, settings)
    blocks = [error for error in errors if error.place == BLOCK]
    modules = errors if settings.modules else []
    kl_k3, mean_abs_diff = token_kl(estimator, *(_logprobs(workspace, leg) for leg in ("train", "infer")))
    model = preparation.manifest.model
    return Localization(
        tool_version=__version__,
        created_at=environment.utc_now(),
        model=model.name,
        model_fingerprint=model.fingerprint,
        settings=settings,
        num_sequences=len(sequences),
        num_tokens=estimator.sequences.num_tokens,
        looked_into_sequences=len(chosen_sequences),
        looked_into_tokens=inside.sequences.num_tokens,
        kl_k3=kl_k3,
        mean_abs_diff=mean_abs_diff,
        blocks=blocks,
        modules=modules,
        first_difference=first_difference(errors),
        enters=enters(blocks),
        suspects=find_suspects(places, errors, settings.infer_dtype, settings.train_dtype),
        routers=router_decisions(routers, inside),
        unmatched=names.modules_without_place({error.place for error in modules}) if settings.modules else [],
        interventions=_interventions(estimator, workspace, settings, notes) if settings.interventions else None,
        seconds={name: round(value, 3) for name, value in seconds.items()},
        stored_bytes=max(note.stored_bytes for note in notes.values()),
        peak_memory_bytes={job: note.peak_memory_bytes for job, note in notes.items()},
    )


def _interventions(
    estimator: Estimator, workspace: Workspace, settings: LocalizeSettings, notes: dict[str, JobNotes]
) -> Interventions | None:
    """None where the sides agree bit for bit, so that there is nothing to remove."""
    if np.array_equal(_logprobs(workspace, "train"), _logprobs(workspace, "infer")):
        return None
    trials = [trial for note in notes.values() for trial in note.trials]
    left_out = {what: why for note in notes.values() for what, why in note.left_out.items()}
    if not has_low_kv_cache(settings):
        left_out["KV cache"] = "it is in the model's format, above which vLLM keeps none"
    return judge_interventions(trials, estimator, partial(_logprobs, workspace), left_out)


def _logprobs(workspace: Workspace, leg: str) -> Floats:
    """All response tokens' log-probs in the order of the rollouts [T].

    Raises:
        EngineError: one is missing or not finite.
    """
    column: Any = read_table(workspace.leg(leg), columns=["logprobs"])["logprobs"]
    flat: pa.Array = column.combine_chunks().flatten()
    logprobs = np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float64)
    if not (usable := is_usable(logprobs)).all():
        raise EngineError(
            f"{(~usable).sum()} of {usable.size} log-probs in the leg {leg} are missing or not finite: there is no "
            "deviation to look into; see with compare which responses lack them"
        )
    return logprobs
