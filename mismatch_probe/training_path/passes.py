"""The passes in which a model scores padded batches: which rows share one, and on which streams or ranks passes run.

On a CPU several passes are computed at once. Within one pass every operation waits for its slowest thread, hundreds of
times a second for a small model; streams wait for each other once a batch. The result of a pass depends on its own rows
and on the number of threads of a stream, never on which stream computes it or when.
"""

import copy
import gc
import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain
from typing import Any, Final, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from mismatch_probe.config.model import CPU_PASS_TOKENS, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.host import Closing
from mismatch_probe.images import model_inputs
from mismatch_probe.records.sequences import PromptImages, ScoredSequence, TokenSequence
from mismatch_probe.training_path.arithmetic import Arithmetic, torch_dtype
from mismatch_probe.training_path.batching import (
    PAD_ID,
    ChunkedHead,
    PaddedBatch,
    TokenScores,
    in_order,
    pad_batch,
    plan_passes,
    score_hidden_states,
)
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.observation import describe_model
from mismatch_probe.training_path.rank_group import Shares

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_STREAMS: Final = 8
"""More streams would wait for each other in Python."""


def most_streams() -> int:
    """The largest number of passes that are computed at once."""
    return min(torch.get_num_threads(), _MOST_STREAMS)


def in_streams(
    model: PreTrainedModel,
    items: Sequence[Item],
    work: Callable[[PreTrainedModel, Item], Result],
    common: Iterable[torch.nn.Module] = (),
) -> list[Result]:
    """The results of `work(model, item)`, in order; raises what `work` raises.

    Stream i modulo their number computes item i. Every stream but the first has a copy of `model` for this call that
    shares its weights, so that what a forward keeps in its modules stays in its stream. The modules in `common` are not
    copied.
    """
    num_threads = torch.get_num_threads()
    num_streams = min(most_streams(), len(items))
    if num_streams <= 1:
        return [work(model, item) for item in items]
    models = [model, *(_sharing_weights(model, common) for _ in range(num_streams - 1))]

    def stream(number: int) -> list[Result]:
        torch.set_num_threads(num_threads // num_streams)
        return [work(models[number], item) for item in items[number::num_streams]]

    try:
        with ThreadPoolExecutor(num_streams) as pool:
            shares = list(pool.map(stream, range(num_streams)))
    finally:
        torch.set_num_threads(num_threads)
    return [shares[index % num_streams][index // num_streams] for index in range(len(items))]


def _sharing_weights(model: PreTrainedModel, common: Iterable[torch.nn.Module]) -> PreTrainedModel:
    memo: dict[int, object] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers(), common)}
    return copy.deepcopy(model, memo)


class PassScorer(Closing):
    """A model that scores batches in passes; use it in a `with` block, or `close` it."""

    def __init__(
        self, model: PreTrainedModel, arithmetic: Arithmetic, settings: TrainingPathSettings, *, temperature: float
    ) -> None:
        self._model = model
        self._arithmetic = arithmetic
        self._settings = settings
        self._temperature = temperature
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size: int = embeddings.weight.shape[0]
        self._head = ChunkedHead(model)
        is_double = arithmetic.dtype == Dtype.FP64
        self._log_softmax_dtype = torch.float64 if is_double else torch_dtype(settings.log_softmax_dtype)
        on_cpu = arithmetic.device_type == "cpu"
        self._shares = None if settings.num_ranks is None else Shares.of_settings(settings)
        self._can_stream = on_cpu and settings.precision != "fsdp" and settings.device_map is None and not self._shares
        cache_tokens = max(1, CPU_PASS_TOKENS * 2 // arithmetic.dtype.num_bytes)
        self._pass_tokens = min(cache_tokens, settings.batch_tokens) if on_cpu else settings.batch_tokens
        self._description = describe_model(model)

    def score_batch(self, batch: list[TokenSequence], *, pad_id: int = PAD_ID) -> list[ScoredSequence]:
        """Score one batch; see `score_together`."""
        (scores,) = self.score_together([batch], pad_id=pad_id)
        return scores

    def score_together(self, batches: list[list[TokenSequence]], *, pad_id: int = PAD_ID) -> list[list[ScoredSequence]]:
        """Score each response of batches of `plan_batches`, in order; in FP64 where the arithmetic is, else in FP32.

        The passes of a batch depend on that batch alone; ranks share the passes of all batches. On a CPU a batch is
        computed in several passes, several at once. Padding is on the right, where causal attention never looks. A
        padded row whose scores are not finite is scored again alone, so that an overflow in the padding cannot reach
        it; a score that is not finite even then is the model's own and is returned.
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
            for rows in self._plan_batch(batch)
        ]
        scores = in_order(passes, self._run_passes(passes, score))
        padded_rows = [
            row for rows in passes for row in rows if sequences[row].num_tokens < sequences[rows[0]].num_tokens
        ]
        retries = [row for row in padded_rows if not np.isfinite(scores[row].logprobs).all()]
        for row, (score_of_row,) in zip(retries, self._run_passes([[row] for row in retries], score), strict=True):
            scores[row] = score_of_row
        return [scores[end - len(batch) : end] for end, batch in zip(ends, batches, strict=True)]

    @property
    def batches_at_once(self) -> int:
        """The number of batches that keep every rank busy, even where each is one pass, as on a GPU."""
        return 1 if self._shares is None else self._shares.of

    def close(self) -> None:
        """Give the model's memory back."""
        del self._model, self._head
        gc.collect()
        if self._arithmetic.device_type == "cuda":
            torch.cuda.empty_cache()

    def image_inputs(self, images: PromptImages, num_tokens: int) -> dict[str, torch.Tensor]:
        """What the model takes besides the ids of one sequence of `num_tokens` inputs whose prompt holds images."""
        inputs = model_inputs(images, num_tokens, inspect.signature(self._model.forward).parameters)
        return {name: values.to(self._model.device) for name, values in inputs.items()}

    @property
    def _num_streams(self) -> int:
        return most_streams() if self._can_stream else 1

    def _rehearse_scoring(self) -> None:
        """Compute scores from hidden states once in one thread, before several threads do; the short pass does not.

        Where several threads at once are the first to call an operator under a dispatch mode (`CpuProducts`), PyTorch
        can keep a pointer to a Python object that was deleted, and the process ends with SIGSEGV.
        """
        sequences = [TokenSequence("", [0], [0] * length) for length in (1, 2)]
        batch = pad_batch(sequences, vocab_size=self._vocab_size)
        hidden_BSD = self._head.last_hidden[:, :1].expand(*batch.input_ids_BS.shape, -1)
        self._scores_of_hidden(self._head, hidden_BSD, batch).by_sequence(sequences)

    def _plan_batch(self, batch: list[TokenSequence]) -> list[list[int]]:
        """The rows of each pass of a batch; one with images has a pass of its own: nothing is padded."""
        alone = [[row] for row, sequence in enumerate(batch) if sequence.images is not None]
        rows = [row for row, sequence in enumerate(batch) if sequence.images is None]
        passes = plan_passes(
            [batch[row].num_tokens for row in rows],
            self._pass_tokens,
            self._num_streams,
            self._description["rope_follows_length_beyond"],
        )
        return [*alone, *([rows[place] for place in places] for places in passes)]

    def _run_passes(
        self,
        passes: Sequence[Item],
        work: Callable[[PreTrainedModel, Item], Result],
        common: Sequence[torch.nn.Module] = (),
    ) -> list[Result]:
        """The results of `work(model, pass)`, in order, in this scorer's arithmetic.

        On a CPU several passes run at once, each on a copy of the model without the modules in `common`. Each rank
        computes its share of the passes.
        """

        def in_arithmetic(model: PreTrainedModel, item: Item) -> Result:
            with self._arithmetic.active_in_thread():
                return work(model, item)

        with self._arithmetic.flags_set():
            if self._can_stream:
                return in_streams(self._model, passes, in_arithmetic, common)
            if self._shares is not None:
                return self._shares.map_shared(passes, partial(in_arithmetic, self._model))
            return [in_arithmetic(self._model, item) for item in passes]

    def _score_padded(self, head: ChunkedHead, sequences: list[TokenSequence], pad_id: int) -> list[ScoredSequence]:
        padded_batch = pad_batch(sequences, vocab_size=self._vocab_size, pad_id=pad_id)
        num_rows, width = padded_batch.input_ids_BS.shape
        with memory_errors_named(
            f"scoring {num_rows} sequences of up to {width} tokens",
            f"halve training.batch_tokens (now {self._settings.batch_tokens}), or use a device with more memory",
        ):
            images = sequences[0].images
            others = {} if images is None else self.image_inputs(images, width)
            hidden_BSD = head.body(padded_batch.input_ids_BS.to(self._model.device), **others)
            return self._scores_of_hidden(head, hidden_BSD, padded_batch).by_sequence(sequences)

    def _scores_of_hidden(self, head: ChunkedHead, hidden_BSD: torch.Tensor, batch: PaddedBatch) -> TokenScores:
        at = hidden_BSD.device
        return score_hidden_states(
            head,
            hidden_BSD[batch.rows_T.to(at), batch.positions_T.to(at)],
            batch.targets_T.to(at),
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            log_softmax_dtype=self._log_softmax_dtype,
        )
