"""A model that ranks hold: FSDP2 changes no bit, tensor parallelism is told, a fault of one rank ends all."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, OutOfMemory, StorageError, UsageError
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import Scorer
from tests.tiny_models import make_checkpoint
from tests.training_path.flat import mean_error
from tests.training_path.ranks.jobs import score_over_ranks

pytestmark = pytest.mark.slow

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny model whose heads two ranks can divide."""
    home = tmp_path_factory.mktemp("divisible")
    return lambda family: make_checkpoint(home / family, family, **HEADS)


def batches(sequences: list[TokenSequence]) -> list[list[TokenSequence]]:
    """Several rows, and one alone: some ranks have nothing of their own to compute."""
    return [sequences, sequences[:1]]


def by_one(
    folder: Path, dtype: Dtype, sequences: list[TokenSequence], settings: dict[str, Any], **named: Any
) -> list[ScoredSequence]:
    """The scores of one process that holds the whole model."""
    with Scorer.load(folder, dtype, TrainingPathSettings(ranks=1, **settings), **named) as scorer:
        return [one for batch in batches(sequences) for one in scorer.score_batch(batch)]


def same_bits(left: list[ScoredSequence], right: list[ScoredSequence]) -> bool:
    return [one.id for one in left] == [one.id for one in right] and all(
        np.array_equal(one.logprobs, other.logprobs) and np.array_equal(one.entropy_nats, other.entropy_nats)
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    ("family", "ranks", "dtype", "settings"),
    [
        ("qwen3", 4, Dtype.BF16, {}),
        ("qwen3-moe", 2, Dtype.BF16, {}),
        ("gemma2", 2, Dtype.FP16, {}),
        ("llama", 2, Dtype.FP16, {"precision": "fsdp"}),
        ("llama", 2, Dtype.BF16, {"precision": "autocast"}),
        ("llama", 2, Dtype.FP16, {"precision": "to"}),
        ("llama", 3, Dtype.FP32, {}),
    ],
)
def test_ranks_give_the_bits_of_one_process(
    family: str,
    ranks: int,
    dtype: Dtype,
    settings: dict[str, Any],
    divisible: Checkpoint,
    sequences: list[TokenSequence],
) -> None:
    folder = divisible(family)
    arguments = TrainingPathSettings(ranks=ranks, **settings)
    scored, effective = score_over_ranks(ranks, folder, dtype, arguments, batches(sequences))
    assert same_bits(scored, by_one(folder, dtype, sequences, settings))
    assert effective["ranks"]["ranks"] == ranks
    assert effective["ranks"]["held_share"] < 1.2 / ranks
    assert effective["ranks"]["against_whole"] == {"difference": 0.0, "why_not": None}


@pytest.mark.parametrize(("tensor_parallel", "at_once", "passes_here"), [(1, 2, 2), (2, 1, 4)])
def test_batches_of_one_pass_are_shared_by_ranks_that_divide_no_product(
    tensor_parallel: int, at_once: int, passes_here: int, divisible: Checkpoint, sequences: list[TokenSequence]
) -> None:
    """On a GPU each batch is one pass: taken one by one, all ranks would compute the same."""
    arguments = TrainingPathSettings(ranks=2, tensor_parallel=tensor_parallel)
    alone = [[sequence] for sequence in sequences[:4]]
    _, effective = score_over_ranks(2, divisible("qwen3"), Dtype.BF16, arguments, alone)
    assert (effective["at_once"], effective["passes_here"]) == (at_once, passes_here)


@pytest.mark.parametrize(("dtype", "num_threads"), [(Dtype.BF16, None), (Dtype.FP32, None), (Dtype.FP32, 2)])
def test_large_products_have_the_bits_of_one_process_with_as_many_threads(
    dtype: Dtype, num_threads: int | None, sequences: list[TokenSequence], tmp_path: Path
) -> None:
    """A rank's share of the cores, or as many as it is told, whatever its share is."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "head_dim": 128}
    folder = make_checkpoint(tmp_path, "llama", init_std=0.03, num_hidden_layers=1, **wide)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) // 2))
    try:
        expected = by_one(folder, dtype, sequences, {})
    finally:
        torch.set_num_threads(threads)
    arguments = (2, folder, dtype, TrainingPathSettings(ranks=2), batches(sequences))
    scored, _ = score_over_ranks(*arguments, num_threads=num_threads)
    assert same_bits(scored, expected)


@pytest.mark.parametrize("rounded_to", [None, Dtype.FP16])
def test_the_reference_over_ranks_is_the_reference(
    rounded_to: Dtype | None, divisible: Checkpoint, sequences: list[TokenSequence]
) -> None:
    folder, named = divisible("qwen3"), {"reference": True, "rounded_to": rounded_to}
    scored, _ = score_over_ranks(
        2, folder, Dtype.FP32, TrainingPathSettings(ranks=2), batches(sequences), **named
    )  # fmt: skip
    assert same_bits(scored, by_one(folder, Dtype.FP32, sequences, {}, **named))


@pytest.mark.parametrize(("family", "ranks"), [("qwen3", 4), ("llama", 2), ("qwen3-moe", 2)])
def test_tensor_parallelism_is_another_pi_by_rounding_alone(
    family: str, ranks: int, divisible: Checkpoint, sequences: list[TokenSequence]
) -> None:
    folder, errors = divisible(family), {}
    for dtype in (Dtype.FP32, Dtype.BF16):
        settings = TrainingPathSettings(ranks=ranks, tensor_parallel=2)
        scored, effective = score_over_ranks(ranks, folder, dtype, settings, batches(sequences))
        errors[dtype] = mean_error(scored, by_one(folder, dtype, sequences, {}))
        assert effective["tensor_parallel"] == 2
        assert 0 < effective["ranks"]["against_whole"]["difference"] < (0.5 if dtype.rounds_coarsely else 1e-4)
    assert errors[Dtype.FP32] < 1e-5
    assert errors[Dtype.BF16] > 100 * errors[Dtype.FP32]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 1}, r"1 key and value heads \(num_key_value_heads\)"),
        ({**HEADS, "vocab_size": 321}, r"321 tokens in the vocabulary \(vocab_size\)"),
        ({**HEADS, "intermediate_size": 127}, r"127 numbers in an MLP \(intermediate_size\)"),
    ],
)
def test_what_does_not_divide_is_refused_by_name_and_fsdp2_takes_it(
    changes: dict[str, int], words: str, tmp_path: Path, sequences: list[TokenSequence]
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", **changes)
    with pytest.raises(UsageError, match=f"has {words}, which tensor_parallel = 2 does not divide"):
        score_over_ranks(2, folder, Dtype.BF16, TrainingPathSettings(tensor_parallel=2), batches(sequences))
    scored, _ = score_over_ranks(2, folder, Dtype.BF16, TrainingPathSettings(ranks=2), batches(sequences))
    assert same_bits(scored, by_one(folder, Dtype.BF16, sequences, {}))


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_version_that_loads_whole_weights_all_the_same_is_refused(
    tensor_parallel: int, divisible: Checkpoint, sequences: list[TokenSequence]
) -> None:
    settings = TrainingPathSettings(ranks=2, tensor_parallel=tensor_parallel)
    with pytest.raises(EngineError, match=r"each rank holds whole weights all the same, such as model\.\w+"):
        score_over_ranks(2, divisible("llama"), Dtype.BF16, settings, batches(sequences), fault="loads whole")


def test_a_version_without_distributed_config_is_asked_by_its_earlier_keyword(
    divisible: Checkpoint, sequences: list[TokenSequence]
) -> None:
    """transformers still takes both, and gives the same model."""
    settings = TrainingPathSettings(tensor_parallel=2)
    arguments = (2, divisible("llama"), Dtype.BF16, settings, batches(sequences))
    older, effective = score_over_ranks(*arguments, fault="older transformers")
    assert same_bits(older, score_over_ranks(*arguments)[0])
    assert effective["ranks"]["held_share"] < 0.8


def test_a_version_that_knows_no_fsdp_is_refused(divisible: Checkpoint, sequences: list[TokenSequence]) -> None:
    settings = TrainingPathSettings(ranks=2)
    with pytest.raises(EngineError, match="cannot shard a model over ranks by FSDP2"):
        score_over_ranks(*(2, divisible("llama"), Dtype.BF16, settings, batches(sequences)), fault="older transformers")


def test_a_rank_that_holds_other_weights_is_seen_in_the_short_pass(
    divisible: Checkpoint, sequences: list[TokenSequence]
) -> None:
    with pytest.raises(EngineError, match="gives other logits than held by one process"):
        score_over_ranks(
            *(2, divisible("llama"), Dtype.BF16, TrainingPathSettings(ranks=2), batches(sequences)),
            fault="holds another part",
        )


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("is killed", OutOfMemory, "rank 1 of scoring was killed"),
        ("raises", StorageError, "the disk of this rank is full"),
    ],
)
def test_what_ends_one_rank_ends_all_with_its_sentence(
    fault: str, error: type[Exception], words: str, divisible: Checkpoint, sequences: list[TokenSequence]
) -> None:
    begun = time.monotonic()
    with pytest.raises(error, match=words):
        score_over_ranks(
            *(2, divisible("llama"), Dtype.BF16, TrainingPathSettings(ranks=2), batches(sequences)), fault=fault
        )
    assert time.monotonic() - begun < 60


def test_ranks_without_their_processes_are_refused(llama: Path) -> None:
    with pytest.raises(UsageError, match="over 2 ranks, and this command runs it on 1"):
        Scorer.load(llama, Dtype.BF16, TrainingPathSettings(ranks=2))
