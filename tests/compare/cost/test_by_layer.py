"""A reference that will hold one layer at a time: when, and what that takes of time and memory."""

from dataclasses import replace
from typing import Any

import pytest

from mismatch_probe.compare.cost.memory import most_hidden_bytes, process_memory, stages_by_layer, with_stages_by_layer
from mismatch_probe.compare.cost.roofline import Calibration
from mismatch_probe.compare.cost.stage_work import Workload, loading_work, work_of
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.dtypes import Dtype
from tests.compare.cost.workloads import ARCHITECTURE, calibration, settings, stage, workload

LARGE = replace(ARCHITECTURE, parameters=70_000_000_000, layer_parameters=850_000_000, outside_parameters=2_000_000_000)
REFERENCE = "score-ref-fp32"
ROUNDED = ("score-ref-fp32-weights-bf16", "score-ref-fp32-weights-fp16")


def with_free(free_bytes: int) -> Calibration:
    return calibration(memory_bytes=2**40).model_copy(update={"free_memory_bytes": {"cpu": free_bytes}})


def layered(free_bytes: int, **changes: Any) -> Workload:
    large = workload(architecture=LARGE, checkpoint_dtype=Dtype.BF16, **changes)
    return with_stages_by_layer(large, make_plan(large.settings).stages, with_free(free_bytes))


def test_the_references_that_do_not_fit_what_is_free_are_named_with_both_sizes() -> None:
    large = workload(architecture=LARGE)
    named = stages_by_layer(make_plan(settings()).stages, large, with_free(100 * 10**9))
    assert list(named) == [REFERENCE, *ROUNDED]
    assert "take 260.8 GiB, and 93.1 GiB are free (cpu)" in named[REFERENCE]
    assert stages_by_layer(make_plan(settings()).stages, large, with_free(400 * 10**9)) == {}


@pytest.mark.parametrize(("is_asked_for", "free_bytes", "expected"), [(True, 2**40, 2), (False, 2**20, 0)])
def test_what_is_asked_for_is_done_whatever_is_free(is_asked_for: bool, free_bytes: int, expected: int) -> None:
    assert len(layered(free_bytes, reference={"by_layer": is_asked_for}).by_layer) == expected


def test_rounding_that_changes_nothing_is_not_scored_and_not_named() -> None:
    assert layered(100 * 10**9).by_layer == {REFERENCE, "score-ref-fp32-weights-fp16"}


def test_a_device_map_keeps_it_whole() -> None:
    assert not layered(2**20, training={"batch_tokens": 2048, "device_map": "auto"}).by_layer


def test_the_checkpoint_is_read_once_for_the_work_and_for_each_try_before() -> None:
    at_once, by_layer = layered(2**40), layered(100 * 10**9)
    stored = 2 * LARGE.parameters
    planned = stage(REFERENCE)
    assert work_of(planned, at_once).disk_bytes == 0
    assert loading_work(planned, at_once).disk_bytes == stored
    assert work_of(planned, by_layer).disk_bytes == stored
    assert loading_work(planned, by_layer).disk_bytes == 3 * stored
    assert work_of(planned, by_layer).matrix_flops == work_of(planned, at_once).matrix_flops


def test_hidden_states_that_are_too_many_go_through_the_disk_once_a_layer() -> None:
    few, many = layered(10**9), layered(10**5)
    assert (few.hidden_on_disk, many.hidden_on_disk) == (False, True)
    tokens = float(many.lengths.sum()) * 3
    assert most_hidden_bytes(few, [stage(REFERENCE)]) == tokens * LARGE.hidden_size * 4
    moved = work_of(stage(REFERENCE), many).disk_bytes - work_of(stage(REFERENCE), few).disk_bytes
    assert moved == 2 * LARGE.num_layers * tokens * LARGE.hidden_size * 4


@pytest.mark.parametrize(("free_bytes", "layers"), [(100 * 10**9, 2), (13 * 10**9, 1)])
def test_it_holds_what_no_layer_holds_and_two_layers_where_they_fit(free_bytes: int, layers: int) -> None:
    changes = {"pairs": [["bf16", "bf16"]], "reference": {"rounded_weights": False}}
    plan = make_plan(settings(**changes))
    of_reference = [replace(job, stages=(job.stages[0],)) for job in plan.jobs if job.name == "training-path"]
    (memory,) = process_memory(
        replace(plan, jobs=tuple(of_reference)), layered(free_bytes, **changes), with_free(free_bytes)
    )
    stored = 2 * LARGE.layer_parameters
    weights = 4 * (LARGE.outside_parameters + layers * LARGE.layer_parameters) + stored
    assert weights < memory.peak_bytes < weights + 2 * 10**9
