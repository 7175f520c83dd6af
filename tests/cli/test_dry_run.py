"""What people read of a plan: how long, what dominates, how much memory, and on what that rests."""

from io import StringIO

import pytest

from mismatch_probe.cli.dry_run import dry_run_answer
from mismatch_probe.cli.output import PeopleConsole
from mismatch_probe.compare.cost.earlier import MAX_NEW_TOKENS, Pace
from mismatch_probe.compare.cost.forecast import Starting, forecast
from mismatch_probe.compare.cost.memory import ProcessMemory, process_memory
from mismatch_probe.compare.cost.roofline import Span
from mismatch_probe.compare.estimates import DryRun, Outlook, RoundingCheck, StageEstimate
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.notation import write_about, write_size
from mismatch_probe.report.screen import print_answer
from tests.compare.cost.test_headroom_cost import ahead
from tests.compare.cost.workloads import calibration, settings, workload

PLAN = make_plan(settings(pairs=[["bf16", "bf16"]]))


def outlook(
    *,
    compiles: bool = False,
    memory_bytes: int = 2**34,
    earlier: bool = False,
    examines: bool = False,
    check: RoundingCheck | None = None,
) -> Outlook:
    changes = {"pairs": [["bf16", "bf16"]], "engine": {"batch_sequences": 256, "args": {"enforce_eager": not compiles}}}
    known, sizes, plan = calibration(memory_bytes=memory_bytes), workload(**changes), make_plan(settings(**changes))
    return Outlook(
        response_tokens=50,
        response_tokens_from="runs/before" if earlier else MAX_NEW_TOKENS,
        earlier_runs=["runs/before"] if earlier else [],
        rates=known.rates,
        time=forecast(plan.stages, sizes, Pace(known, []), Starting(6.0, on_cpu=True)),
        memory=process_memory(plan, sizes, known),
        headroom=ahead(memory_bytes=memory_bytes) if examines else None,
        rounding_check=check,
    )


def shown(ahead: Outlook | None, why: str = "") -> str:
    stages = [StageEstimate(stage=stage.name, sequences=8, max_tokens=400, weight_bytes=2**20) for stage in PLAN.stages]
    plan = DryRun(
        model="demo",
        architecture="LlamaForCausalLM",
        parameters=100_000,
        num_prompts=8,
        longest_prompt_tokens=20,
        longest_sequence_tokens=71,
        stages=stages,
        max_disk_bytes=2**24,
        outlook=ahead,
        no_outlook_because=why,
    )
    output = StringIO()
    print_answer(dry_run_answer(plan), PeopleConsole(output))
    return output.getvalue()


def test_the_whole_time_is_an_interval_and_its_longest_stage_is_named() -> None:
    ahead = outlook()
    text = shown(ahead)
    longest = max(ahead.time.stages, key=lambda one: one.work.likely_seconds)
    total = ahead.time.total
    about = write_about(total.likely_seconds, total.low_seconds, total.high_seconds)
    assert f"time: {about} in all, " in text
    assert f"to start processes and load models; the longest stage is {longest.stage}" in text
    assert total.low_seconds < 0.7 * total.likely_seconds < 1.4 * total.likely_seconds < total.high_seconds
    assert "if responses have 50 tokens, their limit; it takes less if they end before" in text
    assert "by rates measured now" in text
    assert "WARNING" not in text


def test_earlier_runs_are_named_where_they_tell() -> None:
    text = shown(outlook(earlier=True))
    assert "50 tokens on average, as in runs/before" in text
    assert "by rates measured now and by the stages of runs/before" in text


def test_a_start_that_nothing_tells_is_not_counted_and_said_so() -> None:
    assert "and the start of a compiling engine, 1 times, which no earlier run shows" in shown(outlook(compiles=True))


def test_a_process_that_will_not_fit_is_warned_about() -> None:
    text = shown(outlook(memory_bytes=2**29))
    assert "WARNING: training-path will not fit at " in text


@pytest.mark.parametrize("why", ["the weights are quantised, and what their kernels take is not known here"])
def test_no_estimate_is_one_sentence(why: str) -> None:
    text = shown(None, why)
    assert f"time and memory: no estimate, {why}" in text
    assert "disk: at most" in text


def test_the_examination_for_fp16_is_in_time_and_memory_where_it_was_asked_for() -> None:
    alone, both = outlook(), outlook(examines=True)
    assert both.headroom is not None
    assert both.total.likely_seconds == alone.total.likely_seconds + both.headroom.time.likely_seconds
    text = shown(both)
    spans = (both.total, both.time.total)
    about = [write_about(span.likely_seconds, span.low_seconds, span.high_seconds) for span in spans]
    assert f"This takes {about[0]}, " in text
    assert " of it for headroom, and fits into memory." in text
    assert f"time: {about[1]} to compare, " in text
    assert "memory: headroom needs about " in text
    assert "headroom" not in shown(alone)
    assert "WARNING: headroom will not fit" in shown(outlook(examines=True, memory_bytes=2**20))


@pytest.mark.parametrize(("available_bytes", "end"), [(2**33, ""), (2**30, ", which do not suffice")])
def test_a_check_of_rounding_that_may_come_is_one_sentence_with_its_time_and_memory(
    available_bytes: int, end: str
) -> None:
    memory = ProcessMemory(
        process="training-path-rounding",
        stage="score-ref-fp64",
        device="cpu",
        peak_bytes=2**31,
        available_bytes=available_bytes,
    )
    text = shown(outlook(check=RoundingCheck(time=Span.around(120, 2), memory=[memory])))
    size = write_size(available_bytes)
    assert "later: where a pair would be called a bug by its size alone" in text
    assert f"takes about 2 min (1 to 4) more and at most 2.0 GiB of {size} (cpu){end}" in text
    assert ("which do not suffice" in text) == bool(end)
    assert "WARNING" not in text, "most runs never need it"
    assert "later:" not in shown(outlook())
