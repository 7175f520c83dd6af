"""The job of the training path: pi in each dtype and the reference score the recorded ids.

A reference that is computed layer by layer takes all batches of its stage at once; its leg is recorded when the last
layer is done.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import RankPlace
from mismatch_probe.compare.continuation import is_recorded, samplers_left
from mismatch_probe.compare.plan import (
    BatchDone,
    EffectiveSettings,
    LayersDone,
    PlannedJob,
    StageDone,
    StageStarted,
    fixed_batches,
    run_scores_together,
    send_event,
    skip,
)
from mismatch_probe.compare.stages import (
    TOO_LONG,
    FloorStage,
    FullVocabularyStage,
    RoutingStage,
    ScoreStage,
    TrainingStage,
    repeated_rows,
    with_starts,
    without_starts,
)
from mismatch_probe.compare.subsamples import compare_distributions, record_routing, responses_with_experts
from mismatch_probe.config.model import Attention
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.images import BOTH_WAYS, images_of, processor_facts
from mismatch_probe.records.legs import read_prompts
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.records.tables import leg_table, prompts_of, read_table, sequences_of
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.by_layer_model import fit_in_memory, why_by_layer
from mismatch_probe.training_path.by_layer_scorer import HiddenStates, LayerByLayerScorer
from mismatch_probe.training_path.fit import held_weights, measure_weight_cast
from mismatch_probe.training_path.loading import has_sdpa, load_config, sdpa_leaves_out
from mismatch_probe.training_path.rank_group import dismiss, join
from mismatch_probe.training_path.scorer import RanksScorer, Scorer
from mismatch_probe.verdict.preflight.facts import AGREEMENT

_RESPONSES_OF_AGREEMENT: Final = 2


def run_scoring(run: RunDirectory, manifest: Manifest, job: PlannedJob, events: Send) -> None:
    """Score every leg of the job that is not recorded yet."""
    scoring = _ScoringStages(run, manifest, events)
    pending = [
        stage
        for stage in job.stages
        if isinstance(stage, TrainingStage)
        and manifest.stages[stage.name].state != "skipped"
        and not is_recorded(run, manifest, stage)
    ]
    for side, stages in groupby(pending, key=lambda stage: stage.model):
        scoring.run(side, list(stages))


def run_scoring_over_ranks(
    run: RunDirectory, manifest: Manifest, job: PlannedJob, events: Send, place: RankPlace
) -> None:
    """`run_scoring` on the first of several ranks that hold each model together; others run `ranks.scorer.follow`."""
    join(place)
    run_scoring(run, manifest, job, events)
    dismiss()


class _ScoringStages:
    """The stages of a run's training path, grouped by the model that they need."""

    def __init__(self, run: RunDirectory, manifest: Manifest, events: Send) -> None:
        self._run = run
        self._manifest = manifest
        self._events = events
        columns = ["id", "sampler", "prompt_id", "prompt_token_ids", "token_ids"]
        rollouts = read_table(run.rollouts_path, columns=columns)
        prompts = [] if manifest.images is None else prompts_of(read_prompts(run, manifest.run_key))
        self._prompt_images = images_of(prompts)
        sequences = sequences_of(rollouts, prompts)
        self._by_sampler: dict[str, list[TokenSequence]] = {}
        for sampler, sequence in zip(rollouts["sampler"].to_pylist(), sequences, strict=True):
            self._by_sampler.setdefault(sampler, []).append(sequence)

    def run(self, side: Side, stages: list[TrainingStage]) -> None:
        """Run the stages that need the same model."""
        folder = Path(self._manifest.identity_of(side).folder)
        if side.rounded_to is not None and _rounding_is_exact(folder, side):
            self._skip_stages(
                stages, f"every weight is exactly representable in {side.rounded_to}: rounding changes nothing"
            )
            return
        other_attention = stages[0].attention if isinstance(stages[0], FloorStage) else None
        no_floor = _why_no_floor(other_attention, folder, side)
        if no_floor is not None:
            self._skip_stages(stages, no_floor)
            return
        try:
            scorer = self._load_model(side, stages)
        except (UsageError, EngineError) as error:
            if other_attention is None:
                raise
            self._skip_stages(stages, f"the model does not run with {other_attention} attention: {error}")
            return
        with scorer:
            for stage in stages:
                settings = {**scorer.effective_settings(), **self._agreement(stage, scorer), **self._images(scorer)}
                send_event(self._events, EffectiveSettings(stage=stage.name, settings=settings))
                if isinstance(stage, FullVocabularyStage):
                    sequences = self._by_sampler[stage.mu.sampler]
                    compare_distributions(
                        self._run, self._manifest, stage, sequences, scorer.distributions, self._events
                    )
                elif isinstance(stage, RoutingStage):
                    self._record_experts(stage, scorer)
                elif isinstance(stage, ScoreStage):
                    self._score_responses(stage, scorer)
                else:
                    self._score_floor(stage, scorer)

    def _agreement(self, stage: TrainingStage, scorer: Scorer | RanksScorer) -> dict[str, Any]:
        """The setting that says whether a reference agrees with itself, measured on two responses before it scores."""
        side, earlier_settings = stage.side, self._manifest.stages[stage.name].effective_settings
        if not isinstance(stage, ScoreStage) or side.role != "ref" or side.rounded_to is not None:
            return {}
        if AGREEMENT in earlier_settings:
            return {AGREEMENT: earlier_settings[AGREEMENT]}
        sequences = list(chain.from_iterable(self._by_sampler[name] for name in stage.samplers))
        rows = repeated_rows(sequences, _RESPONSES_OF_AGREEMENT)
        return {AGREEMENT: scorer.agreement_with_itself([sequences[row] for row in rows])}

    def _images(self, scorer: Scorer | RanksScorer) -> dict[str, Any]:
        """The setting that says how images are prepared and seen; none where no prompt holds any."""
        if not self._prompt_images or not isinstance(scorer, Scorer):
            return {}
        first = self._prompt_images[0]
        sees_both_ways = BOTH_WAYS in scorer.image_inputs(first, first.num_prompt)
        attention = "both ways" if sees_both_ways else "causal"
        return {"images": {"attention": attention, **processor_facts(Path(first.folder))}}

    def _load_model(self, side: Side, stages: list[TrainingStage]) -> Scorer | RanksScorer:
        assert side.training is not None
        if side.role == "ref" and not side.num_ranks:
            why = why_layered(self._run, self._manifest, side, stages)
            if why is not None:
                return load_layered(self._manifest, side, why)
        load = partial(RanksScorer, num_threads=self._num_threads(stages)) if side.num_ranks else Scorer.load
        return load(
            self._manifest.identity_of(side).folder,
            side.dtype,
            side.training,
            reference=side.role == "ref",
            rounded_to=side.rounded_to,
            temperature=self._manifest.settings.sampling.temperature,
            trust_remote_code=side.model.trust_remote_code,
        )

    def _num_threads(self, stages: Sequence[TrainingStage]) -> int | None:
        """The threads of each rank where a leg continues, so that all its rows have one arithmetic; None for a share.

        On a CPU ranks share the threads, and another number of threads adds up a large product in another order.
        """
        records = [self._manifest.growing.get(stage.name, self._manifest.stages[stage.name]) for stage in stages]
        record_settings = (record.effective_settings for record in records if record.effective_settings)
        return next((settings.get("num_threads") for settings in record_settings), None)

    def _score_responses(self, stage: ScoreStage, scorer: Scorer | RanksScorer) -> None:
        """Score all responses, each with its prompt's start."""
        samplers = samplers_left(self._run, stage)
        sequences = [
            sequence for name, sequences in self._by_sampler.items() if name in samplers for sequence in sequences
        ]
        batch_tokens = self._manifest.settings.training.batch_tokens
        batches = plan_batches([sequence.num_tokens for sequence in sequences], batch_tokens)
        if isinstance(scorer, LayerByLayerScorer):
            double = stage.side.dtype == Dtype.FP64
            score_by_layer(self._run, stage, sequences, batches, scorer, self._events, double=double)
            return

        def score(batches: list[list[TokenSequence]]) -> list[list[ScoredSequence]]:
            scores = scorer.score_together([with_starts(batch) for batch in batches])
            return [without_starts(with_prompts, batch) for with_prompts, batch in zip(scores, batches, strict=True)]

        self._record_scores(stage, scorer, sequences, batches, score)

    def _score_floor(self, stage: FloorStage, scorer: Scorer | RanksScorer) -> None:
        """Score a few responses of each sampler, each in a pass of its own."""
        samplers, most = samplers_left(self._run, stage), self._manifest.settings.floors.num_sequences
        sequences = [
            self._by_sampler[name][row] for name in samplers for row in repeated_rows(self._by_sampler[name], most)
        ]
        if not sequences:
            self._skip_stages([stage], TOO_LONG)
            return
        self._record_scores(stage, scorer, sequences, fixed_batches(len(sequences), 1), scorer.score_together)

    def _record_scores(
        self,
        stage: ScoreStage | FloorStage,
        scorer: Scorer | RanksScorer,
        sequences: Sequence[TokenSequence],
        batches: Sequence[list[int]],
        score: Callable[[list[list[TokenSequence]]], list[list[ScoredSequence]]],
    ) -> None:
        double = stage.side.dtype == Dtype.FP64
        at_once = scorer.batches_at_once
        run_scores_together(self._run, stage, sequences, batches, score, self._events, at_once=at_once, double=double)

    def _record_experts(self, stage: RoutingStage, scorer: Scorer | RanksScorer) -> None:
        """Record the experts on the responses whose engine recorded its own; skipped where there are none."""
        samplers = samplers_left(self._run, stage)
        records = {mu.sampler: self._manifest.stages[mu.stage("routing")] for mu in stage.engines}
        names = [name for name in samplers if records[name].state != "skipped"]
        sequences = [
            sequence for name in names for sequence in responses_with_experts(self._by_sampler[name], self._manifest)
        ]
        if not sequences:
            self._skip_stages([stage], next(records[name].note for name in samplers))
            return
        record_routing(self._run, stage, sequences, scorer.routing, self._events)

    def _skip_stages(self, stages: Sequence[TrainingStage], why: str) -> None:
        for stage in stages:
            skip(stage.name, why, self._events)


def _why_no_floor(attention: Attention | None, folder: Path, side: Side) -> str | None:
    """Why another attention than the side's own gives no floor: there is none, or it drops a part of the model.

    This is decided before anything is loaded, since an error of one of several ranks ends all of them.
    """
    if attention != "sdpa":
        return None
    config = load_config(folder, trust_remote_code=side.model.trust_remote_code)
    if not has_sdpa(config):
        return f"transformers has no sdpa attention for {config.model_type} models"
    omission = sdpa_leaves_out(config)
    return None if omission is None else f"sdpa attention leaves out {omission}"


def _rounding_is_exact(folder: Path, side: Side) -> bool:
    assert side.training is not None
    assert side.rounded_to is not None
    weights = held_weights(folder, side.training)
    return weights is not None and measure_weight_cast(weights, side.rounded_to).is_exact


_HIDDEN_STATES: Final = "hidden"


def why_layered(run: RunDirectory, manifest: Manifest, side: Side, stages: Sequence[TrainingStage]) -> str | None:
    """Why a reference is computed layer by layer, as one that began so is; None where it is loaded at once."""
    assert side.training is not None
    if any(any(run.parts(stage.name, stage.outputs).sibling(_HIDDEN_STATES).glob("*")) for stage in stages):
        return "it was begun so"
    folder = Path(manifest.identity_of(side).folder)
    return why_by_layer(folder, side.dtype, side.training, manifest.settings.reference)


def load_layered(manifest: Manifest, side: Side, why: str) -> LayerByLayerScorer:
    """Load a reference layer by layer."""
    assert side.training is not None
    return LayerByLayerScorer.load_layered(
        Path(manifest.identity_of(side).folder),
        side.dtype,
        side.training,
        why=why,
        rounded_to=side.rounded_to,
        temperature=manifest.settings.sampling.temperature,
        trust_remote_code=side.model.trust_remote_code,
    )


def score_by_layer(
    run: RunDirectory,
    stage: ScoreStage,
    sequences: Sequence[TokenSequence],
    batches: Sequence[list[int]],
    scorer: LayerByLayerScorer,
    events: Send,
    *,
    double: bool,
) -> None:
    """Score the batches that are not recorded yet, from the layer that they have reached."""
    parts = run.parts(stage.name, stage.outputs)
    parts.open()
    pending = {
        number: [sequences[row] for row in rows] for number, rows in enumerate(batches) if not parts.is_done(number)
    }
    send_event(events, StageStarted(stage=stage.name, batches=len(batches), batches_done=len(batches) - len(pending)))
    tokens = sum(sequence.num_tokens for batch in pending.values() for sequence in batch)
    in_memory = fit_in_memory(tokens * scorer.hidden_size * stage.side.dtype.num_bytes)
    states = HiddenStates(parts.sibling(_HIDDEN_STATES), in_memory=in_memory)

    def layer_done(num_layers: int, of: int) -> None:
        send_event(events, LayersDone(stage=stage.name, done=num_layers, of=of))

    with_prompts = {number: with_starts(batch) for number, batch in pending.items()}
    for batch in scorer.score_batches(with_prompts, states, layer_done):
        rows = pending[batch.number]
        scores = without_starts(batch.scores, rows)
        parts.write(batch.number, {stage.leg: leg_table(rows, scores, double=double)})
        states.forget(batch.number)
        response_tokens = sum(len(sequence.token_ids) for sequence in rows)
        event = BatchDone(stage=stage.name, sequences=len(rows), tokens=response_tokens, seconds=batch.seconds)
        send_event(events, event)
    send_event(events, StageDone(stage=stage.name))
