"""How many ranks hold a side's model: a setting that changes no arithmetic, and may be another when a run goes on."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.compare.plan import make_plan
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings, parse_side
from mismatch_probe.config.model import EngineSettings
from mismatch_probe.config.resuming import held_by_ranks, resumed_comparison
from mismatch_probe.errors import UsageError


def settings(**given: Any) -> CompareSettings:
    return parse_settings(CompareSettings, {"model": {"path": "demo"}, **given})


def test_ranks_are_a_setting_of_a_training_side_and_no_difference_in_arithmetic() -> None:
    assert parse_side("train", "two:dtype=bf16,ranks=2,tensor_parallel=2") == {
        **{"name": "two", "dtype": "bf16"},
        **{"ranks": 2, "tensor_parallel": 2},
    }
    train = [{"name": "two", "dtype": "bf16", "ranks": 2}, {"name": "tp", "dtype": "bf16", "tensor_parallel": 2}]
    two, tp, bf16 = (settings(train=train, pairs=[(name, "bf16") for name in ("two", "tp", "bf16")])).train_sides
    assert (two.num_ranks, tp.num_ranks, bf16.num_ranks) == (2, 2, 0)
    assert two.differs_from(bf16) == []
    assert tp.differs_from(bf16) == ["tensor_parallel = 2"]


def test_the_reference_is_held_by_as_many_ranks_as_the_sides_of_its_weights_and_divides_no_product() -> None:
    sides = settings(train=[{"name": "tp", "dtype": "bf16", "tensor_parallel": 2}], pairs=[("tp", "bf16")])
    reference = sides.reference_of(sides.train_sides[0])
    assert reference is not None
    assert reference.training is not None
    assert (reference.training.num_ranks, reference.training.tensor_parallel) == (2, 1)


def test_models_over_ranks_have_jobs_of_their_own() -> None:
    two = {"name": "two", "dtype": "bf16", "ranks": 2}
    plan = make_plan(settings(train=[two], pairs=[("two", "bf16"), ("fp32", "fp32")]))
    jobs = {job.name: job.num_ranks for job in plan.jobs if job.process == "training"}
    assert jobs == {"training-path": 0, "training-path-ranks-2": 2}


@pytest.mark.parametrize("given", [{"train": [{"name": "two", "dtype": "bf16", "ranks": 4}]}, {}])
def test_a_run_goes_on_over_another_number_of_ranks(given: dict[str, Any]) -> None:
    recorded = settings(train=[{"name": "two", "dtype": "bf16", "ranks": 2}], pairs=[("two", "bf16")])
    given = {**given, "pairs": [("two", "bf16")]} if given else {"training": {"ranks": 4}}
    now = resumed_comparison(Path("run"), recorded, given, lambda settings: settings)
    assert [side.name for side in now.train] == ["two"]
    assert now.train[0].ranks == (4 if "train" in given else 2)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_run_with_a_side_that_divides_products_goes_on_over_any_number_of_ranks(ranks: int) -> None:
    sides = [{"name": "two", "dtype": "bf16", "ranks": 2}, {"name": "tp", "dtype": "bf16", "tensor_parallel": 2}]
    pairs = [("bf16", "bf16"), ("two", "bf16"), ("tp", "bf16")]
    recorded = settings(train=sides, pairs=pairs, training={"ranks": 2})
    now = resumed_comparison(Path("run"), recorded, {"training": {"ranks": ranks}}, lambda settings: settings)
    assert [side.num_ranks for side in now.train_sides] == [ranks, 2, 4 if ranks == 4 else 2]


def test_torchruns_ranks_hold_every_side_or_the_side_that_they_cannot_hold_is_named() -> None:
    sides = [{"name": "two", "dtype": "bf16", "ranks": 2}, {"name": "tp", "dtype": "bf16", "tensor_parallel": 2}]
    given = settings(train=sides, pairs=[("two", "bf16"), ("tp", "bf16")])
    assert [side.num_ranks for side in held_by_ranks(given, 4).train_sides] == [4, 4]
    for ranks in (1, 3):
        words = (
            rf"the side tp divides products among 2 ranks .*, {ranks}, is no multiple of that; start a multiple of 2"
        )
        with pytest.raises(UsageError, match=words):
            held_by_ranks(given, ranks)


@pytest.mark.parametrize(
    ("args", "ranks"),
    [
        ({}, 0),
        ({"tensor_parallel_size": 4}, 0),
        ({"distributed_executor_backend": "mp", "tensor_parallel_size": 4}, 0),
        ({"distributed_executor_backend": "external_launcher"}, 1),
        ({"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 4}, 4),
        ({"distributed_executor_backend": "external_launcher", "pipeline_parallel_size": "2"}, 2),
    ],
)
def test_an_engine_of_an_external_launcher_takes_a_rank_for_each_part(args: dict[str, object], ranks: int) -> None:
    assert parse_settings(EngineSettings, {"args": args}).num_ranks == ranks
    side = {"name": "two", "dtype": "bf16", "args": args}
    jobs = make_plan(settings(infer=[side], pairs=[("bf16", "two")])).jobs
    assert {job.name: job.num_ranks for job in jobs} == {"engine-two": ranks, "training-path": 0}
