"""Log-probs of recorded responses under the training policy pi, or under the high-precision reference.

One process holds the model, or several ranks hold it together: then every rank makes the calls of the first rank.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Self

from transformers import PreTrainedModel

from mismatch_probe.children.start import RankPlace
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype, short_name
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.stored_tensors import quantized_facts
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import FloatArray, ScoredSequence, TokenSequence
from mismatch_probe.training_path import rank_group
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.attention import AttentionChoice
from mismatch_probe.training_path.batching import log_distributions, pad_batch
from mismatch_probe.training_path.fit import WeightCast, held_weights, measure_weight_cast
from mismatch_probe.training_path.inside.recording import record_routing
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.observation import agreement_with_itself, describe_arithmetic, short_pass
from mismatch_probe.training_path.passes import PassScorer
from mismatch_probe.training_path.precision import load_reference_model, load_training_model
from mismatch_probe.training_path.rank_sharding import WholePass, held_share, whole_pass

_BY_LAYER: Final = "hold one layer of the reference at a time (--reference-by-layer), or use a device with more memory"


class Scorer(PassScorer):
    """The training policy or the reference, loaded from a checkpoint; it reports its effective settings."""

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        arithmetic: Arithmetic,
        settings: TrainingPathSettings,
        *,
        temperature: float,
        weights_dtype: Dtype,
        attention_choice: AttentionChoice | None = None,
        whole_model: WholePass | None = None,
    ) -> None:
        """attention_choice: the reference's. whole_model: the short pass of the model in one process."""
        super().__init__(model, arithmetic, settings, temperature=temperature)
        self._folder = folder
        self._weights_dtype = weights_dtype
        self._attention_choice = attention_choice
        is_expanded = not getattr(model, "is_quantized", False)
        self._quantized = quantized_facts(folder, None, weights_dtype, is_expanded=is_expanded)
        advice = "use a smaller model, or a training.device with more memory"
        self._held_share = None if self._shares is None else held_share(model)
        with memory_errors_named("running the model on a short probe", advice), arithmetic.active():
            self._short_pass = short_pass(model, self._head)
            if self._can_stream:
                self._rehearse_scoring()
            self._against_whole = (
                None if whole_model is None else whole_model.compare(model, arithmetic.dtype, settings)
            )

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        dtype: Dtype,
        settings: TrainingPathSettings,
        *,
        reference: bool = False,
        rounded_to: Dtype | None = None,
        temperature: float = 1.0,
        trust_remote_code: bool = False,
    ) -> Self:
        """pi in `dtype` under `settings`, or with `reference` the reference in `dtype` (fp32 or fp64) arithmetic.

        The reference takes device, device_map, ranks, batch_tokens and the adapter from `settings` and nothing else;
        with `rounded_to` it computes on the weights rounded to that format. `checkpoint` is a folder.

        Raises:
            UsageError: the checkpoint, the device or the combination cannot be used.
            EngineError: the model does not support what is asked, or cannot be scored in chunks.
            MissingExtra: a package that the settings need is not installed.
            OutOfMemory: the model does not fit.
        """
        folder = Path(checkpoint)
        if not folder.is_dir():
            raise UsageError(f"checkpoint {checkpoint} is not a folder; give --model a checkpoint's folder or a hub id")
        device = choose_device(settings.device)
        attention_choice = one_rank_pass = None
        if reference:
            if not dtype.can_be_reference:
                raise UsageError(f"a reference in {dtype} would carry the error it is to measure; use fp32 or fp64")
            settings = TrainingPathSettings(
                device=settings.device,
                device_map=settings.device_map,
                batch_tokens=settings.batch_tokens,
                adapter=settings.adapter,
                adapter_merged=settings.adapter_merged,
                ranks=settings.ranks,
            )
            load_reference = partial(
                load_reference_model,
                *(folder, dtype),
                device=device,
                rounded_to=rounded_to,
                trust_remote_code=trust_remote_code,
                advice=_BY_LAYER,
            )
            one_rank_pass = whole_pass(
                folder, dtype, settings, device, lambda settings: load_reference(settings=settings)[:2]
            )
            model, arithmetic, attention_choice = load_reference(settings=settings)
        elif rounded_to is not None:
            raise UsageError(
                f"weights rounded to {rounded_to} are for the reference; pi's weights follow its own dtype"
            )
        else:
            load = partial(load_training_model, folder, dtype, device=device, trust_remote_code=trust_remote_code)
            one_rank_pass = whole_pass(folder, dtype, settings, device, lambda settings: load(settings=settings))
            model, arithmetic = load(settings=settings)
        weights_dtype = rounded_to or dtype
        return cls(
            folder,
            model,
            arithmetic,
            settings,
            temperature=temperature,
            weights_dtype=weights_dtype,
            attention_choice=attention_choice,
            whole_model=one_rank_pass,
        )

    def distributions(self, sequence: TokenSequence, positions: Sequence[int]) -> FloatArray:
        """Log-probs (nats) of every token of the vocabulary at some positions of a response [P, V]; one pass, alone."""
        batch = pad_batch([sequence], vocab_size=self._vocab_size)
        advice = "lower full_vocabulary.positions, or use a device with more memory"
        with memory_errors_named("comparing whole distributions", advice), self._arithmetic.active():
            width = batch.input_ids_BS.shape[1]
            others = {} if sequence.images is None else self.image_inputs(sequence.images, width)
            hidden_BSD = self._head.body(batch.input_ids_BS.to(self._model.device), **others)
            state_positions = batch.positions_T[list(positions)].to(hidden_BSD.device)
            log_probs: FloatArray = (
                log_distributions(
                    self._head.logits(hidden_BSD[0, state_positions]),
                    temperature=self._temperature,
                    log_softmax_dtype=self._log_softmax_dtype,
                )
                .cpu()
                .numpy()
            )
        return log_probs

    def routing(self, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
        """The experts of each token and their weights; one pass over the sequences, in order."""
        advice = "read fewer responses, or use a device with more memory"
        with memory_errors_named("reading the choice of experts", advice), self._arithmetic.active():
            return record_routing(self._model, sequences)

    def agreement_with_itself(self, sequences: Sequence[TokenSequence]) -> dict[str, Any] | None:
        """How far passes over the same tokens are apart that must agree; see `observation.agreement_with_itself`."""
        advice = "use a device with more memory"
        with memory_errors_named("scoring responses with a cache", advice), self._arithmetic.active():
            ids = [[*sequence.prompt_token_ids, *sequence.token_ids] for sequence in sequences]
            return agreement_with_itself(self._model, ids)

    def effective_settings(self) -> dict[str, Any]:
        """The effective settings; `dtype` is the format of most multiplications of the short pass.

        Autocast does not reach experts that are computed in one kernel, in any trainer: `experts_dtype` is theirs.
        """
        weight_cast, formats = self.weight_cast, self._short_pass.body_formats
        autocasts = self._arithmetic.autocast_dtype is not None
        return {
            "dtype": formats.prevailing_outside_experts if autocasts else formats.prevailing,
            "experts_dtype": formats.prevailing_in_experts,
            "multiplications_by_dtype": dict(formats.multiplications),
            "precision": "reference" if self._arithmetic.is_reference else self._settings.precision,
            **self._description,
            "quantized": self._quantized,
            "attention_choice": None if self._attention_choice is None else self._attention_choice.as_dict(),
            **describe_arithmetic(self._arithmetic),
            "lm_head_dtype": self._short_pass.head_formats.prevailing,
            "log_softmax_dtype": short_name(self._log_softmax_dtype),
            "temperature": self._temperature,
            "weight_cast": None if weight_cast is None else weight_cast.as_dict(),
            "chunked_head_difference": self._short_pass.head_difference,
            "pass_tokens": self._pass_tokens,
            "passes_at_once": self._num_streams,
            "tensor_parallel": self._settings.tensor_parallel,
            "ranks": None if self._shares is None else self._ranks_record(),
        }

    def _ranks_record(self) -> dict[str, Any]:
        """The record of how ranks hold the model; nothing in it changes a number."""
        assert self._shares is not None
        return {
            "ranks": rank_group.size(),
            "held_share": self._held_share,
            "against_whole": None if self._against_whole is None else self._against_whole.as_dict(),
        }

    @cached_property
    def weight_cast(self) -> WeightCast | None:
        """Measures what rounding the weights to the scored format changes; None where no file holds them."""
        weights = held_weights(self._folder, self._settings)
        return None if weights is None else measure_weight_cast(weights, self._weights_dtype)


class RanksScorer(rank_group.HeldByRanks[Scorer]):
    """A `Scorer` on the first rank; the other ranks run `follow`. All ranks must have joined the group."""

    def __init__(
        self,
        checkpoint: str | Path,
        dtype: Dtype,
        settings: TrainingPathSettings,
        *,
        num_threads: int | None = None,
        **keywords: Any,
    ) -> None:
        """num_threads: of each rank; None for its share. The other arguments are those of `Scorer.load`."""
        super().__init__(_load_scorer, num_threads, checkpoint, dtype, settings, **keywords)

    def score_batch(self, batch: list[TokenSequence]) -> list[ScoredSequence]:
        (scores,) = self.score_together([batch])
        return scores

    def score_together(self, batches: list[list[TokenSequence]]) -> list[list[ScoredSequence]]:
        scores: list[list[ScoredSequence]] = self._on_every_rank("score_together", batches)
        return scores

    def distributions(self, sequence: TokenSequence, positions: Sequence[int]) -> FloatArray:
        log_probs: FloatArray = self._on_every_rank("distributions", sequence, positions)
        return log_probs

    def routing(self, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
        routing: list[SequenceRouting] = self._on_every_rank("routing", sequences)
        return routing

    def agreement_with_itself(self, sequences: Sequence[TokenSequence]) -> dict[str, Any] | None:
        agreement: dict[str, Any] | None = self._on_every_rank("agreement_with_itself", sequences)
        return agreement

    @property
    def batches_at_once(self) -> int:
        return self._model.batches_at_once

    def effective_settings(self) -> dict[str, Any]:
        return self._model.effective_settings()


def follow(place: RankPlace) -> None:
    """What every rank but the first does, until that one says that it is done."""
    rank_group.follow_first(place, _load_scorer, ends_with_close=False)


def _load_scorer(num_threads: int | None, *arguments: Any, **keywords: Any) -> Scorer:
    rank_group.take_threads(num_threads)
    return Scorer.load(*arguments, **keywords)
