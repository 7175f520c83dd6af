"""A log is scored or explained with a checkpoint, on the log's own token ids.

Nothing is sampled. The logged sides keep their numbers; the new run has them next to the sides that are computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.children import start
from mismatch_probe.children.messages import Send
from mismatch_probe.compare.derived_runs import rows_of_side, without_sampling
from mismatch_probe.compare.preparation import Preparation, prepare
from mismatch_probe.compare.run import resume_run, start_run
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import ExplainSettings, LoggedSide
from mismatch_probe.config.sides import LOG_SIDE, InferSide, Side, TrainSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.importing.rows import CHOICES_LEG
from mismatch_probe.importing.run import note_of
from mismatch_probe.importing.selection import responses_of_step, without_images
from mismatch_probe.logs.checks.log import UnitSums, unit_findings
from mismatch_probe.provenance.checkpoint import fingerprint, read_config, vocab_size
from mismatch_probe.provenance.environment import content_key
from mismatch_probe.reading import merge_tables
from mismatch_probe.records.findings import Explanation, Findings
from mismatch_probe.records.legs import CHOICES, Legs, read_prompts, spans_of_tokens, with_choices, write_rollouts
from mismatch_probe.records.manifest import LogNote, LogOrigin, Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.records.tables import in_order, prompts_of, read_table
from mismatch_probe.stats.bases import moments
from mismatch_probe.stats.sequences import is_usable, of_sampled_tokens
from mismatch_probe.tasks import resolve_model


def vocabulary_notes(run: RunDirectory, manifest: Manifest, rollouts: pa.Table, size: int | None) -> list[LogNote]:
    """Notes on logged numbers of these responses that a vocabulary of this size cannot give.

    There are none where the size is not known (None).
    """
    if size is None:
        return []
    legs, ids = Legs(run, manifest.run_key), rollouts["id"].to_pylist()
    masks = [np.asarray(mask, dtype=np.bool_) for mask in rollouts["sampled"].to_pylist()]
    sums = UnitSums()
    mu = in_order(legs.read(manifest.settings.mu(LOG_SIDE).leg("decode")), ids)["logprobs"].to_pylist()
    for values, mask in zip(mu, masks, strict=True):
        log_mu = of_sampled_tokens(np.asarray(values, dtype=np.float64)[mask])
        sums.surprisal = sums.surprisal + moments(-log_mu[is_usable(log_mu)])
    pi = next((side for side in manifest.settings.train_sides if side.logged), None)
    entropies = [] if pi is None else in_order(legs.read(pi.leg()), ids)["entropy_nats"].to_pylist()
    for values, mask, where in zip(entropies, masks, rollouts["where"].to_pylist(), strict=False):
        highest = np.nanmax(np.asarray(values, dtype=np.float64)[mask], initial=0.0) if values is not None else 0.0
        if highest > sums.highest_entropy:
            sums.highest_entropy, sums.highest_at = float(highest), where
    return [note_of(finding) for finding in unit_findings(sums, size)]


_EXACT_PAIR: Final = (Dtype.FP32.value, Dtype.FP32.value)
"""The pair of computed sides that decides between precision and a bug."""


@dataclass(frozen=True)
class ScoreRequest:
    """The legs that are to be computed."""

    train_dtype: Dtype | None = None
    infer_dtype: Dtype | None = None
    """The dtypes of the computed sides; those of the log's sides where None."""
    with_engine: bool = True
    step: int | None = None
    """Only responses of this step are scored."""


def open_scoring(log_run: RunDirectory, path: Path, request: ScoreRequest, options: dict[str, Any]) -> RunDirectory:
    """Make, or continue, the run at `path`: an imported run's responses, to be scored with a checkpoint.

    `options` are settings of the command line: the model, and how it is computed.

    Raises:
        UsageError: the checkpoint or the settings cannot be used, or do not fit the responses.
        RunDirectoryError: a run does not exist, or `path` holds something else.
        BrokenRecord: the log's records cannot be read.
    """
    first = log_run.read_manifest()
    if first.log is None:
        raise UsageError(
            f"{log_run.path} was not imported from a log; to score its responses with other settings, give "
            "`diff A B --rescore`"
        )
    rollouts = responses_of_step(read_table(log_run.rollouts_path), log_run.path, request.step)
    settings = _scoring_settings(first, log_run, request, options)
    preparation = prepare(settings, responses_are_given=True)
    config = read_config(Path(preparation.manifest.model.folder))
    rollouts, of_images = without_images(rollouts, config, log_run.path)
    preparation = _with_recorded_ids(preparation, log_run, first.run_key, rollouts)
    engines = [mu for mu in settings.infer_sides if not mu.logged]
    log_mu = settings.mu(LOG_SIDE)
    copies = [rollouts, *(rows_of_side(rollouts, mu) for mu in engines)]
    everything = pa.concat_tables(copies).combine_chunks()
    manifest = without_sampling(preparation.manifest, f"the responses are those of {log_run.path}", everything)
    logged_sides = [side for side in (log_mu, *settings.train_sides) if side.logged]
    notes = vocabulary_notes(log_run, first, rollouts, vocab_size(config))
    notes = [*map(note_of, of_images), *notes]
    origin = _origin_with_notes(first.log, rollouts, notes)
    manifest = manifest.model_copy(
        update={"log": origin, "stages": manifest.stages | _logged_stages(first, logged_sides)}
    )
    preparation = replace(preparation, manifest=manifest)
    run = (resume_run if RunDirectory(path).is_run else start_run)(path, preparation)
    run_key = run.read_manifest().run_key
    write_rollouts(run, run_key, everything)
    _copy_logged_legs(Legs(log_run, first.run_key), Legs(run, run_key), logged_sides, rollouts["id"])
    _copy_explanation(Findings(log_run.path), Findings(run.path), preparation.manifest.model.fingerprint, rollouts)
    return run


def _copy_explanation(old: Findings, new: Findings, fingerprint_of_model: str, rollouts: pa.Table) -> None:
    """What `explain` found of these responses with this checkpoint is known of the new run too, whose only responses
    they are. What it could not explain says nothing there, where more is computed.
    """
    steps = set(rollouts["step"].to_pylist())
    for explanation in old.explanations():
        is_of_these = {explanation.step} == steps or (explanation.step is None and not new.explanations())
        is_of_model = explanation.model_fingerprint == fingerprint_of_model
        if is_of_these and is_of_model and explanation.verdict.kind in ("bug", "clean") and not new.explanations():
            new.write(explanation.model_copy(update={"step": None}))


def _scoring_settings(
    first: Manifest, log_run: RunDirectory, request: ScoreRequest, options: dict[str, Any]
) -> CompareSettings:
    """The settings of the new run: the sides of the log, the computed sides, and the pairs of them."""
    was = first.settings
    mu = was.mu(LOG_SIDE)
    log_pi = next((side for side in was.train_sides if side.logged), None)
    train = request.train_dtype or was.train_sides[0].dtype
    infer = request.infer_dtype or mu.dtype
    pairs = [] if log_pi is None else [(LOG_SIDE, LOG_SIDE)]
    pairs.append((train.value, LOG_SIDE))
    if request.with_engine:
        pairs += [(train.value, infer.value), _EXACT_PAIR]
    num_prompts = read_prompts(log_run, first.run_key, ["prompt_id"]).num_rows
    own = {
        "infer": (InferSide(name=LOG_SIDE, dtype=mu.dtype, logged=True),),
        "train": () if log_pi is None else (TrainSide(name=LOG_SIDE, dtype=log_pi.dtype, logged=True),),
        "pairs": tuple(dict.fromkeys(pairs)),
        "prompts": {"source": str(log_run.prompts_path), "num_prompts": num_prompts, "chat_template": "never"},
        "sampling": was.sampling.model_dump(),
        "full_vocabulary": {"positions": 0},
    }
    return CompareSettings.model_validate(merge_tables(own, options))


def _with_recorded_ids(
    preparation: Preparation, log_run: RunDirectory, run_key: str, rollouts: pa.Table
) -> Preparation:
    """The prompts that the responses answer, with the ids of the imported run."""
    imported_prompts = prompts_of(read_prompts(log_run, run_key))
    ids_of_prompts = {tuple(prompt.token_ids): prompt.prompt_id for prompt in imported_prompts}
    answered_ids = set(rollouts["prompt_id"].to_pylist())
    renamed_prompts = [
        replace(prompt, prompt_id=ids_of_prompts[tuple(prompt.token_ids)]) for prompt in preparation.prompts
    ]
    prompts = [prompt for prompt in renamed_prompts if prompt.prompt_id in answered_ids]
    key = content_key([[prompt.prompt_id, prompt.token_ids] for prompt in prompts])
    keys = preparation.manifest.content_keys | {"prompts": key}
    manifest = preparation.manifest.model_copy(update={"content_keys": keys})
    return replace(preparation, manifest=manifest, prompts=prompts)


def _origin_with_notes(log: LogOrigin, rollouts: pa.Table, notes: Sequence[LogNote]) -> LogOrigin:
    """The record of the log for these responses, with notes on numbers that the checkpoint's vocabulary rules out."""
    num_tokens = pc.sum(pc.list_flatten(rollouts["sampled"]).cast(pa.int64())).as_py()
    codes = {(note.code, note.column) for note in log.notes}
    return log.model_copy(
        update={
            "analysed_responses": rollouts.num_rows,
            "analysed_tokens": num_tokens,
            "notes": [*log.notes, *(note for note in notes if (note.code, note.column) not in codes)],
        }
    )


def _logged_stages(first: Manifest, logged_sides: Sequence[Side]) -> dict[str, StageRecord]:
    """The records of the logged sides' stages, as they were imported."""
    names = [side.stage("sample" if side.role == "mu" else "score") for side in logged_sides]
    return {name: first.stages[name] for name in names}


def _copy_logged_legs(old: Legs, new: Legs, logged_sides: Sequence[Side], ids: pa.ChunkedArray) -> None:
    for side in logged_sides:
        leg = side.leg("decode" if side.role == "mu" else "")
        table = old.read(leg)
        new.write(leg, table.filter(pc.is_in(table["id"], value_set=ids.combine_chunks())).combine_chunks())


MOST_RESPONSES: Final = 128

ProgressCallback = Callable[[LoggedSide, int, int, str, float | None], None]
"""A progress callback as `explain` takes it."""


def explain_log(
    run: RunDirectory, settings: ExplainSettings, step: int | None, most_responses: int, tell: ProgressCallback
) -> Explanation:
    """Explain each side of the log on at most `most_responses` responses of a step; `tell` is the progress callback."""
    _require_log(run)
    responses_of_step(read_table(run.rollouts_path), run.path, step)
    folder = resolve_model(settings.model).absolute()
    model_settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(folder)})})
    job = start.Job(
        name="explaining the log",
        function=explain_responses,
        arguments=(str(run.path.absolute()), model_settings.model_dump(mode="json"), step, most_responses),
        preload="training",
        when_killed="lower --num-responses",
    )
    facts = {"settings": settings, "step": step, "model_fingerprint": fingerprint(folder)}
    return Explanation.model_validate(start.run(job, lambda progress: tell(*progress))).model_copy(update=facts)


def explain_responses(
    send: Send, run: str, settings: Mapping[str, Any], step: int | None, most_responses: int
) -> dict[str, Any]:
    """The job of `explain_log`; its result is JSON."""
    from mismatch_probe.explain import explain

    own_settings = ExplainSettings.model_validate(settings)
    responses = logged_responses(
        RunDirectory(Path(run)), step, most_responses, read_config(Path(own_settings.model.path))
    )
    explanation = explain(own_settings, responses, lambda *progress: send(list(progress)))
    return explanation.model_dump(mode="json")


def logged_responses(
    run: RunDirectory, step: int | None, most: int, config: Mapping[str, Any] | None = None
) -> list[LoggedResponse]:
    """The first `most` responses of a step, with their logged numbers; where sets that tokens were drawn from are
    recorded, those that have them.

    config: the checkpoint's, whose placeholders of images leave a response out.
    """
    manifest = run.read_manifest()
    settings = manifest.settings
    rollouts = responses_of_step(read_table(run.rollouts_path), run.path, step)
    mu = settings.mu(LOG_SIDE)
    rollouts = rollouts.filter(pc.equal(rollouts["sampler"], mu.sampler)).combine_chunks()
    rollouts = without_images(rollouts, config or {}, run.path)[0].slice(0, most).combine_chunks()
    legs, ids = Legs(run, manifest.run_key), rollouts["id"].to_pylist()
    log_mu = _logged_rows(legs, mu.leg("decode"), ids)
    pi = next((side for side in settings.train_sides if side.logged), None)
    log_pi = [None] * len(ids) if pi is None else _logged_rows(legs, pi.leg(), ids)
    responses = [
        LoggedResponse(
            where=row["where"],
            prompt_token_ids=np.asarray(row["prompt_token_ids"], dtype=np.int32),
            token_ids=np.asarray(row["token_ids"], dtype=np.int32),
            sampled=np.asarray(row["sampled"], dtype=np.bool_),
            log_mu=mu_row,
            log_pi=pi_row,
            step=row["step"],
            weight_version=row["weight_version"],
            weight_spans=spans_of_tokens(row.get("weight_versions")),
            temperature=settings.sampling.temperature,
            finish_reason=row["finish_reason"],
        )
        for row, mu_row, pi_row in zip(rollouts.to_pylist(), log_mu, log_pi, strict=True)
    ]
    if not legs.path(mu.leg(CHOICES_LEG)).exists():
        return responses
    choices = {row["id"]: row for row in legs.read_rows(mu.leg(CHOICES_LEG), CHOICES).to_pylist()}
    pairs = zip(ids, responses, strict=True)
    responses = [with_choices(each, choices[row_id]) if row_id in choices else each for row_id, each in pairs]
    has_sets = any(response.kept is not None for response in responses)
    return [response for response in responses if response.kept is not None or not has_sets]


def _logged_rows(legs: Legs, name: str, ids: list[str]) -> list[Any]:
    table: pa.Table = in_order(legs.read(name), ids)
    return [np.asarray(row) for row in table["logprobs"].to_pylist()]


def _require_log(run: RunDirectory) -> None:
    if run.read_manifest().log is None:
        raise UsageError(
            f"{run.path} was not imported from a log; `compare` names the cause of its own runs, and `localize --run` "
            "looks inside the model"
        )
