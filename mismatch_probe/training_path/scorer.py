"""Log-probs of recorded responses under the training policy pi, or under the high-precision reference."""

import gc
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from mismatch_probe.config.model import CPU_PASS_TOKENS, TrainingPathSettings
from mismatch_probe.dtypes import Dtype, short_name
from mismatch_probe.errors import UsageError
from mismatch_probe.host import Closing
from mismatch_probe.provenance.stored_tensors import quantized_facts
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import FloatArray, ScoredSequence, TokenSequence
from mismatch_probe.training_path.arithmetic import Arithmetic, torch_dtype
from mismatch_probe.training_path.attention import AttentionChoice
from mismatch_probe.training_path.batching import (
    PAD_ID,
    ChunkedHead,
    PaddedBatch,
    TokenScores,
    in_order,
    log_distributions,
    pad_batch,
    plan_passes,
    score_hidden_states,
)
from mismatch_probe.training_path.fit import WeightCast, held_weights, measure_weight_cast
from mismatch_probe.training_path.generation import Item, Result, in_streams, most_streams
from mismatch_probe.training_path.inside.recording import record_routing
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.observation import describe_arithmetic, describe_model, short_pass
from mismatch_probe.training_path.precision import load_reference_model, load_training_model
from mismatch_probe.training_path.ranks import group
from mismatch_probe.training_path.ranks.group import Shares
from mismatch_probe.training_path.ranks.sharding import WholePass, held_share, whole_pass

_BY_LAYER: Final = "hold one layer of the reference at a time (--reference-by-layer), or use a device with more memory"


class Scorer(Closing):
    """A loaded model that scores batches; use it in a `with` block, or `close` it."""

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
        """`attention_choice` is the reference's; `whole` the short pass of the model that is not held by ranks.

        Raises:
            EngineError: the model's log-probs cannot be computed in chunks.
            OutOfMemory: not even a short probe fits.
        """
        self._folder = folder
        self._model = model
        self._arithmetic = arithmetic
        self._settings = settings
        self._temperature = temperature
        self._weights_dtype = weights_dtype
        self._attention_choice = attention_choice
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size: int = embeddings.weight.shape[0]
        self._head = ChunkedHead(model)
        is_double = arithmetic.dtype == Dtype.FP64
        self._log_softmax_dtype = torch.float64 if is_double else torch_dtype(settings.log_softmax_dtype)
        on_cpu = arithmetic.device_type == "cpu"
        self._shares = None if settings.num_ranks is None else Shares.of_settings(settings)
        self._can_stream = on_cpu and settings.precision != "fsdp" and settings.device_map is None and not self._shares
        cached = max(1, CPU_PASS_TOKENS * 2 // arithmetic.dtype.num_bytes)
        self._pass_tokens = min(cached, settings.batch_tokens) if on_cpu else settings.batch_tokens
        self._description = describe_model(model)
        expanded = not getattr(model, "is_quantized", False)
        self._quantized = quantized_facts(folder, None, weights_dtype, expanded=expanded)
        advice = "use a smaller model, or a training.device with more memory"
        self._held_share = None if self._shares is None else held_share(model)
        with memory_errors_named("running the model on a short probe", advice), arithmetic.active():
            self._short_pass = short_pass(model, self._head)
            if self._can_stream:
                self._rehearse()
            self._against_whole = (
                None if whole_model is None else whole_model.compared(model, arithmetic.dtype, settings)
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
        `rounded_to` has it compute on the weights rounded to that format. `checkpoint` is a folder.

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

    def score_batch(self, batch: list[TokenSequence], *, pad_id: int = PAD_ID) -> list[ScoredSequence]:
        """As `score_together`, of one."""
        (scores,) = self.score_together([batch], pad_id=pad_id)
        return scores

    def score_together(self, batches: list[list[TokenSequence]], *, pad_id: int = PAD_ID) -> list[list[ScoredSequence]]:
        """Scores of each response of batches of `plan_batches`, in order; FP32, or FP64 where the arithmetic is.

        The passes of a batch follow from it alone; over ranks those of all the batches are dealt out together. On a CPU
        a batch is computed in several passes, several at once. Padding stands to the right, where causal
        attention never looks. A row whose scores are not finite although it
        was padded is scored again alone, so that what overflows in padding cannot reach it; what is still not finite
        then is the model's own and is returned as it is.

        Raises:
            UsageError: a sequence has no prompt token, or an id outside the vocabulary.
            OutOfMemory: a batch does not fit.
        """
        sequences = list(chain.from_iterable(batches))
        if not sequences:
            return [[] for _ in batches]
        ends = list(accumulate(map(len, batches)))

        def score(model: PreTrainedModel, rows: list[int]) -> list[ScoredSequence]:
            return self._score_padded(ChunkedHead(model), [sequences[row] for row in rows], pad_id)

        passes = [
            [end - len(batch) + row for row in rows]
            for end, batch in zip(ends, batches, strict=True)
            for rows in self._passes(batch)
        ]
        scores = in_order(passes, self._of_each(passes, score))
        padded = [row for rows in passes for row in rows if sequences[row].num_tokens < sequences[rows[0]].num_tokens]
        retries = [row for row in padded if not np.isfinite(scores[row].logprobs).all()]
        for row, (score_of_row,) in zip(retries, self._of_each([[row] for row in retries], score), strict=True):
            scores[row] = score_of_row
        return [scores[end - len(batch) : end] for end, batch in zip(ends, batches, strict=True)]

    @property
    def batches_at_once(self) -> int:
        """How many batches keep every rank busy, even where each is one pass, as on a GPU."""
        return 1 if self._shares is None else self._shares.of

    def distributions(self, sequence: TokenSequence, positions: Sequence[int]) -> FloatArray:
        """Log-probs (nats) of every token of the vocabulary at some positions of a response [P, V]; one pass, alone.

        Raises:
            UsageError: the sequence has no prompt token, or an id outside the vocabulary.
            OutOfMemory: the sequence does not fit.
        """
        padded = pad_batch([sequence], vocab_size=self._vocab_size)
        advice = "lower full_vocabulary.positions, or use a device with more memory"
        with memory_errors_named("comparing whole distributions", advice), self._arithmetic.active():
            hidden_BSD = self._head.body(padded.input_ids_BS.to(self._model.device))
            chosen = padded.positions_T[list(positions)].to(hidden_BSD.device)
            log_probs: FloatArray = (
                log_distributions(
                    self._head.logits(hidden_BSD[0, chosen]),
                    temperature=self._temperature,
                    log_softmax_dtype=self._log_softmax_dtype,
                )
                .cpu()
                .numpy()
            )
        return log_probs

    def routing(self, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
        """Which experts each token takes, and how it weighs them; one pass over the sequences, in order.

        Raises:
            RoutingUnseen: the model has no experts whose choice could be read.
            UsageError: a sequence has no prompt token, or an id outside the vocabulary.
            OutOfMemory: the sequences do not fit.
        """
        advice = "read fewer responses, or use a device with more memory"
        with memory_errors_named("reading the choice of experts", advice), self._arithmetic.active():
            return record_routing(self._model, sequences)

    def effective_settings(self) -> dict[str, Any]:
        """What really runs, read back; `dtype` is the format that most of the probe's multiplications took.

        Autocast does not reach experts in one kernel, in any trainer: they are told apart as `experts_dtype`.
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
            "ranks": None if self._shares is None else self._over_ranks(),
        }

    def _over_ranks(self) -> dict[str, Any]:
        """How the model is held; nothing in it changes a number."""
        assert self._shares is not None
        return {
            "ranks": group.size(),
            "held_share": self._held_share,
            "against_whole": None if self._against_whole is None else self._against_whole.as_dict(),
        }

    @property
    def _num_streams(self) -> int:
        return most_streams() if self._can_stream else 1

    @cached_property
    def weight_cast(self) -> WeightCast | None:
        """What rounding the weights to the scored format changes; None where no file holds them (`held_weights`)."""
        weights = held_weights(self._folder, self._settings)
        return None if weights is None else measure_weight_cast(weights, self._weights_dtype)

    def close(self) -> None:
        """Give the model's memory back."""
        del self._model, self._head
        gc.collect()
        if self._arithmetic.device_type == "cuda":
            torch.cuda.empty_cache()

    def _rehearse(self) -> None:
        """In one thread, before several do it: what a pass computes behind the model, which the short pass does not.

        Where several threads at once are the first to meet an operator under a dispatch mode (`CpuProducts`), PyTorch
        can be left with a pointer to a Python object that is gone, and the process ends with SIGSEGV.
        """
        sequences = [TokenSequence("", [0], [0] * length) for length in (1, 2)]
        padded = pad_batch(sequences, vocab_size=self._vocab_size)
        hidden_BSD = self._head.last_hidden[:, :1].expand(*padded.input_ids_BS.shape, -1)
        self._behind_body(self._head, hidden_BSD, padded).by_sequence(sequences)

    def _passes(self, batch: list[TokenSequence]) -> list[list[int]]:
        """The rows of a batch that share a pass."""
        lengths = [sequence.num_tokens for sequence in batch]
        return plan_passes(
            lengths, self._pass_tokens, self._num_streams, self._description["rope_follows_length_beyond"]
        )

    def _of_each(
        self,
        passes: Sequence[Item],
        work: Callable[[PreTrainedModel, Item], Result],
        common: Sequence[torch.nn.Module] = (),
    ) -> list[Result]:
        """`work(model, pass)` of each, in order, in this scorer's arithmetic; on a CPU several at once, each on a model
        of its own but for the modules in `common`. Over ranks each computes its share of them.
        """

        def in_arithmetic(model: PreTrainedModel, item: Item) -> Result:
            with self._arithmetic.active_in_thread():
                return work(model, item)

        with self._arithmetic.flags_set():
            if self._can_stream:
                return in_streams(self._model, passes, in_arithmetic, common)
            if self._shares is not None:
                return self._shares.worked_through(passes, partial(in_arithmetic, self._model))
            return [in_arithmetic(self._model, item) for item in passes]

    def _score_padded(self, head: ChunkedHead, sequences: list[TokenSequence], pad_id: int) -> list[ScoredSequence]:
        padded = pad_batch(sequences, vocab_size=self._vocab_size, pad_id=pad_id)
        num_rows, width = padded.input_ids_BS.shape
        with memory_errors_named(
            f"scoring {num_rows} sequences of up to {width} tokens",
            f"halve training.batch_tokens (now {self._settings.batch_tokens}), or use a device with more memory",
        ):
            return self._run(head, padded).by_sequence(sequences)

    def _run(self, head: ChunkedHead, padded: PaddedBatch) -> TokenScores:
        return self._behind_body(head, head.body(padded.input_ids_BS.to(self._model.device)), padded)

    def _behind_body(self, head: ChunkedHead, hidden_BSD: torch.Tensor, padded: PaddedBatch) -> TokenScores:
        at = hidden_BSD.device
        return score_hidden_states(
            head,
            hidden_BSD[padded.rows_T.to(at), padded.positions_T.to(at)],
            padded.targets_T.to(at),
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            log_softmax_dtype=self._log_softmax_dtype,
        )
