"""Memory of each process: what it must hold at least, and a warning where that is more than there is."""

from dataclasses import replace

import pytest

from mismatch_probe.compare.cost.memory import process_memory, with_stages_by_layer
from mismatch_probe.compare.cost.roofline import Calibration
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.dtypes import Dtype
from tests.compare.cost.workloads import ARCHITECTURE, calibration, settings, workload

PLAN = make_plan(settings())
SEVEN_BILLION = replace(ARCHITECTURE, parameters=7_000_000_000)


def test_every_process_holds_at_least_its_weights_in_its_widest_dtype() -> None:
    processes = {
        memory.process: memory for memory in process_memory(PLAN, workload(architecture=SEVEN_BILLION), calibration())
    }
    assert list(processes) == [job.name for job in PLAN.jobs]
    assert processes["engine-bf16"].peak_bytes > 2 * SEVEN_BILLION.parameters
    assert processes["engine-fp32"].peak_bytes > 4 * SEVEN_BILLION.parameters
    assert processes["training-path"].peak_bytes > 4 * SEVEN_BILLION.parameters


@pytest.mark.parametrize(("device", "copies"), [("cpu", 2), ("cuda:0", 0)])
def test_an_engine_on_a_cpu_packs_embedding_and_head_beside_the_weights(device: str, copies: int) -> None:
    machine = calibration()
    rates = [rate.model_copy(update={"device": device}) for rate in machine.rates]
    sizes = {device: 2**40}
    machine = Calibration(rates=rates, device_memory_bytes=sizes, free_memory_bytes=sizes)

    def needed(hidden_size: int) -> int:
        wide = replace(ARCHITECTURE, vocab_size=262_144, hidden_size=hidden_size)
        memory = {each.process: each for each in process_memory(PLAN, workload(architecture=wide), machine)}
        return memory["engine-fp32"].peak_bytes

    assert needed(640) - needed(320) == copies * 4 * 262_144 * 320


def test_what_does_not_fit_is_said_of_that_process_alone() -> None:
    large = workload(architecture=SEVEN_BILLION)
    fits = {memory.process: memory.fits for memory in process_memory(PLAN, large, calibration(memory_bytes=24 * 10**9))}
    assert fits == {"engine-bf16": True, "engine-fp16": True, "engine-fp32": False, "training-path": False}


def test_small_weights_are_not_warned_about() -> None:
    assert all(memory.fits for memory in process_memory(PLAN, workload(), calibration()))


@pytest.mark.parametrize("precision", ["autocast", "fsdp"])
def test_master_weights_stay_in_fp32(precision: str) -> None:
    changes = {"pairs": [["bf16", "bf16"]], "reference": {"rounded_weights": False}, "floors": {"num_sequences": 0}}
    of = {
        how: process_memory(
            make_plan(settings(**changes, training={"batch_tokens": 2048, "precision": how})),
            workload(architecture=SEVEN_BILLION),
            calibration(),
        )[-1].peak_bytes
        for how in ("weights", precision)
    }
    assert of[precision] >= of["weights"]


def test_weights_spread_over_devices_by_a_map_are_not_judged() -> None:
    spread = workload(training={"batch_tokens": 2048, "device_map": "auto"})
    assert "training-path" not in [memory.process for memory in process_memory(PLAN, spread, calibration())]


def test_ranks_hold_a_part_each_and_share_a_host() -> None:
    large = replace(SEVEN_BILLION, layer_parameters=2 * 10**8, outside_parameters=10**9)
    changes = {"pairs": [["bf16", "bf16"]], "reference": {"dtype": "none"}, "floors": {"num_sequences": 0}}

    def needed(device: str, ranks: int | None) -> int:
        training = {"batch_tokens": 2048, "ranks": ranks}
        machine = calibration()
        rates = [rate.model_copy(update={"device": device}) for rate in machine.rates]
        sizes = {device: 2**40}
        machine = Calibration(rates=rates, device_memory_bytes=sizes, free_memory_bytes=sizes)
        plan = make_plan(settings(**changes, training=training))
        return process_memory(plan, workload(architecture=large, training=training), machine)[-1].peak_bytes

    part, gathered = 2 * large.parameters // 8, 2 * (large.outside_parameters + 2 * large.layer_parameters)
    assert part + gathered < needed("cuda:0", 8) < part + gathered + 10**9 < needed("cuda:0", None)
    assert needed("cpu", 8) > 8 * (part + gathered)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cpu", {"engine-bf16": "a smaller model", "training-path": "--reference-by-layer"}),
        ("cuda:0", {"engine-bf16": "--vllm.tensor_parallel_size N", "training-path": "--reference-by-layer"}),
    ],
)
def test_each_process_that_does_not_fit_is_told_what_mends_it(device: str, words: dict[str, str]) -> None:
    machine, changes = calibration(), {"pairs": [["bf16", "bf16"]]}
    rates = [rate.model_copy(update={"device": device}) for rate in machine.rates]
    machine = Calibration(rates=rates, device_memory_bytes={device: 2**30}, free_memory_bytes={device: 2**30})
    memories = process_memory(make_plan(settings(**changes)), workload(architecture=SEVEN_BILLION, **changes), machine)
    assert {memory.process: words[memory.process] in memory.advice for memory in memories} == dict.fromkeys(words, True)
    alone = {**changes, "reference": {"dtype": "none"}}
    *_, pi = process_memory(make_plan(settings(**alone)), workload(architecture=SEVEN_BILLION, **alone), machine)
    assert ("--train-ranks N" in pi.advice) is (device != "cpu")


def test_a_reference_of_rounded_weights_that_computes_nothing_needs_no_memory() -> None:
    changes = {"pairs": [["bf16", "bf16"]], "floors": {"num_sequences": 0}}
    plan, machine = make_plan(settings(**changes)), calibration()
    stored_in = {
        dtype: with_stages_by_layer(
            workload(architecture=SEVEN_BILLION, checkpoint_dtype=dtype, **changes), plan.stages, machine
        )
        for dtype in (Dtype.BF16, Dtype.FP32)
    }
    worst = {dtype: process_memory(plan, sizes, machine)[-1].stage for dtype, sizes in stored_in.items()}
    assert worst[Dtype.BF16] != "score-ref-fp32-weights-bf16"
    assert {"score-ref-fp32", "score-ref-fp32-weights-bf16"} <= stored_in[Dtype.FP32].by_layer
