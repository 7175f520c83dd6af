import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import OutOfMemory, UsageError
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import Scorer, passes
from mismatch_probe.training_path.arithmetic import CpuProducts
from mismatch_probe.training_path.passes import in_streams
from tests.tiny_models import FAMILIES
from tests.training_path.flat import flat

pytestmark = pytest.mark.slow

Checkpoint = Callable[[str], Path]
ROWS = 8


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _a_row_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "CPU_PASS_TOKENS", 1)


@pytest.fixture(scope="module")
def batch() -> list[TokenSequence]:
    random = np.random.default_rng(0)
    lengths = random.integers(20, 60, ROWS).tolist()
    return [
        TokenSequence(str(row), [1], random.integers(0, 256, length).tolist()) for row, length in enumerate(lengths)
    ]


def scores(folder: Path, dtype: Dtype, batch: list[TokenSequence], **settings: Any) -> list[ScoredSequence]:
    reference = settings.pop("reference", False)
    with Scorer.load(folder, dtype, TrainingPathSettings(**settings), reference=reference) as loaded:
        return loaded.score_batch(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_meet_no_operator_first(
    family: str, checkpoint: Checkpoint, batch: list[TokenSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads that meet one at once under a dispatch mode can end the process with SIGSEGV."""
    met: dict[bool, set[Any]] = {True: set(), False: set()}
    dispatch = CpuProducts.__torch_dispatch__

    def noted(mode: CpuProducts, func: Any, *rest: Any) -> Any:
        met[threading.current_thread() is threading.main_thread()].add(func)
        return dispatch(mode, func, *rest)

    monkeypatch.setattr(CpuProducts, "__torch_dispatch__", noted)
    scores(checkpoint(family), Dtype.FP16, batch)
    assert met[False] - met[True] == set()
    assert torch.ops.aten._log_softmax.default in met[False]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, Dtype.FP16) for family in FAMILIES), ("llama", Dtype.BF16), ("llama", Dtype.FP32)],
)
def test_streams_give_the_bits_of_one_pass_after_another(
    family: str, dtype: Dtype, checkpoint: Checkpoint, batch: list[TokenSequence]
) -> None:
    together = scores(checkpoint(family), dtype, batch)
    torch.set_num_threads(1)
    in_turn = scores(checkpoint(family), dtype, batch)
    torch.set_num_threads(2)
    assert [sequence.id for sequence in together] == [sequence.id for sequence in batch]
    np.testing.assert_array_equal(flat(together), flat(in_turn))
    np.testing.assert_array_equal(together[3].top1_ids, in_turn[3].top1_ids)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (Dtype.BF16, {"precision": "autocast"}),
        (Dtype.FP16, {"precision": "autocast"}),
        (Dtype.BF16, {"precision": "to"}),
        (Dtype.BF16, {"precision": "fsdp"}),
        (Dtype.BF16, {"lm_head_dtype": Dtype.FP32}),
        (Dtype.FP32, {"reference": True}),
        (Dtype.FP64, {"reference": True}),
    ],
)
def test_every_arithmetic_reaches_every_stream(
    dtype: Dtype, settings: dict[str, Any], checkpoint: Checkpoint, batch: list[TokenSequence]
) -> None:
    together = scores(checkpoint("llama"), dtype, batch, **settings)
    torch.set_num_threads(1)
    np.testing.assert_array_equal(flat(together), flat(scores(checkpoint("llama"), dtype, batch, **settings)))
    torch.set_num_threads(2)


def test_two_streams_work_on_models_of_their_own_with_the_same_weights(checkpoint: Checkpoint) -> None:
    seen: set[tuple[int, int]] = set()

    def work(model: Any, item: int) -> int:
        seen.add((id(model), model.get_input_embeddings().weight.data_ptr()))
        assert torch.get_num_threads() == 1
        return item * item

    with Scorer.load(checkpoint("llama"), Dtype.BF16, TrainingPathSettings()) as loaded:
        assert in_streams(loaded._model, range(5), work) == [0, 1, 4, 9, 16]
    models, weights = zip(*seen, strict=True)
    assert len(set(models)) == 2
    assert len(set(weights)) == 1


def test_settings_say_how_passes_are_computed(checkpoint: Checkpoint) -> None:
    for settings, at_once in (({}, 2), ({"precision": "fsdp"}, 1)):
        with Scorer.load(checkpoint("llama"), Dtype.BF16, TrainingPathSettings(**settings)) as loaded:
            effective = loaded.effective_settings()
        assert (effective["passes_at_once"], effective["pass_tokens"]) == (at_once, 1)


@pytest.mark.parametrize(("dtype", "tokens"), [(Dtype.BF16, 3072), (Dtype.FP16, 3072), (Dtype.FP32, 1536)])
def test_a_large_batch_is_computed_in_passes_that_fit_the_caches(
    dtype: Dtype, tokens: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with Scorer.load(checkpoint("llama"), dtype, TrainingPathSettings()) as loaded:
        assert loaded.effective_settings()["pass_tokens"] == tokens


def test_a_model_that_was_changed_after_loading_is_scored_as_it_is(
    checkpoint: Checkpoint, batch: list[TokenSequence]
) -> None:
    with Scorer.load(checkpoint("llama"), Dtype.BF16, TrainingPathSettings()) as loaded:
        before = flat(loaded.score_batch(batch))
        loaded._model.model.norm.weight = torch.nn.Parameter(loaded._model.model.norm.weight * 2)
        after = flat(loaded.score_batch(batch))
        lengths = np.cumsum([len(sequence.token_ids) for sequence in batch])[:-1]
    for old, new in zip(np.split(before, lengths), np.split(after, lengths), strict=True):
        assert np.abs(new - old).mean() > 0.1


def test_what_a_stream_raises_is_raised(checkpoint: Checkpoint, batch: list[TokenSequence]) -> None:
    def fail(model: Any, item: int) -> int:
        raise OutOfMemory(f"no room for {item}")

    with Scorer.load(checkpoint("llama"), Dtype.BF16, TrainingPathSettings()) as loaded:
        with pytest.raises(OutOfMemory, match="no room for 0"):
            in_streams(loaded._model, range(4), fail)
        with pytest.raises(UsageError, match="has no prompt token"):
            loaded.score_batch([*batch, TokenSequence("bare", [], [1])])
        assert np.isfinite(flat(loaded.score_batch(batch))).all()
