"""The terminal tells the same story in the same strings."""

import io
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_estimate, write_tokens
from mismatch_probe.records.summary import Summary, Verdict
from mismatch_probe.report.page import answer_on_screen, render_html
from mismatch_probe.report.screen import print_answer, print_line
from mismatch_probe.verdict.headline import headline
from tests.report import samples
from tests.report.documents import headroom

CROSSED: samples.Pairs = (
    (Dtype.BF16, Dtype.BF16),
    (Dtype.FP16, Dtype.FP16),
    (Dtype.FP32, Dtype.FP32),
    (Dtype.FP32, Dtype.BF16),
)


def printed(summary: Summary, *, width: int = 80, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    print_answer(answer_on_screen(summary, Path("runs/one two")), console)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("simulation", [samples.Simulation(), samples.Simulation(bug_nats=2.0)], ids=["clean", "bug"])
def test_every_number_of_the_terminal_stands_on_the_page(simulation: samples.Simulation) -> None:
    summary = samples.summary(CROSSED, simulation)
    page = unescape(re.sub(r"<[^>]+>", "", render_html(summary, samples.manifest(CROSSED))))
    numbers = re.findall(r"[-\d][\d.,]*(?:e-?\d+)?[kMBT]?[*†‡]*", printed(summary))
    assert len(numbers) > 20
    assert [number for number in numbers if number.rstrip(",") not in page] == []
    for interval in re.findall(r"\[[^\]]+\]", printed(summary)):
        assert interval in page


@pytest.mark.slow
def test_a_pipe_gets_one_line_a_pair_and_no_control_codes() -> None:
    text = printed(samples.summary(CROSSED), width=40)
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if "precision" in line and "e-" in line]
    assert len(rows) == 3


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_is_never_overrun_and_no_number_is_cut(width: int) -> None:
    text = printed(samples.summary(CROSSED), width=width, terminal=True)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


def test_hostile_text_cannot_drive_the_terminal() -> None:
    hostile = "\x1b[2J\u202e[bold red]"
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    [pair] = summary.pairs
    verdict = pair.verdict.model_copy(update={"kind": "bug", "sentence": hostile, "advice": [hostile]})
    changed_summary = summary.model_copy(
        update={"pairs": [pair.model_copy(update={"verdict": verdict})], "verdict": verdict}
    )
    text = printed(changed_summary, terminal=True)
    assert "\x1b[2J" not in text
    assert text.count("<U+001B>[2J<U+202E>[bold red]") == 2


def test_data_that_was_left_out_is_named() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    broken = pair.model_copy(update={"counts": pair.counts.model_copy(update={"missing_mu": 1234})})
    assert "1,234 log-probs missing" in printed(summary.model_copy(update={"pairs": [broken]}))
    broken = pair.model_copy(update={"counts": pair.counts.model_copy(update={"positive_pi": 17})})
    assert "17 above 0" in printed(summary.model_copy(update={"pairs": [broken]}))


def test_broken_data_has_a_verdict_and_no_numbers() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    verdict = pair.verdict.model_copy(update={"kind": "broken", "sentence": "The data is broken: 3 are missing."})
    broken = pair.model_copy(update={"verdict": verdict})
    text = printed(summary.model_copy(update={"pairs": [broken], "verdict": verdict}))
    [titles] = [line for line in text.splitlines() if line.startswith("pair")]
    [row] = [line for line in text.splitlines() if line.startswith("BF16")]
    assert titles.split() == ["pair", "verdict"]
    assert not any(character.isdigit() for character in row.removeprefix("BF16")), text
    assert "hold half" not in text


def test_an_extrapolated_budget_is_marked_and_explained() -> None:
    text = printed(samples.summary(((Dtype.FP16, Dtype.FP16),)))
    assert "* extrapolated beyond the longest response measured" in text
    assert re.search(r"\d[kMBT]?\*‡? \[", text)


def test_a_budget_that_could_not_be_fitted_is_the_closed_form_and_says_so() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    assert pair.length is not None
    unfitted = replace(pair.length, budget_tokens=None, budget_tail_is_open=False)
    text = printed(summary.model_copy(update={"pairs": [pair.model_copy(update={"length": unfitted})]}))
    number = write_tokens(unfitted.budget)
    star = "*" if unfitted.is_extrapolated else ""
    assert f"{number.value}{star}† {number.interval}" in text
    assert number.interval != write_tokens(unfitted.budget_closed_form).interval
    assert "† not fitted, but from the KL alone" in text
    further = replace(unfitted, measured_up_to=10)
    text = printed(summary.model_copy(update={"pairs": [pair.model_copy(update={"length": further})]}))
    assert f"{number.value}*† {number.interval}" in text, "beyond the data, as a fitted one"


def test_what_is_too_rare_for_the_sample_is_marked_and_explained_once() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    [pair] = summary.pairs
    assert pair.length is not None
    kl = pair.metrics["kl_k3"]
    assert kl.high is not None
    wide = replace(kl, tail_bound=10 * kl.high)
    length = replace(pair.length, budget_tail_is_open=True)
    closed = {"metrics": {**pair.metrics, "kl_k3": replace(kl, tail_bound=kl.high)}}
    closed["length"] = replace(pair.length, budget_tail_is_open=False)
    assert "‡" not in printed(summary.model_copy(update={"pairs": [pair.model_copy(update=closed)]}))
    pair = pair.model_copy(update={"metrics": {**pair.metrics, "kl_k3": wide}, "length": length})
    text = printed(summary.model_copy(update={"pairs": [pair]}))
    assert f"{write_estimate(kl).value}‡ " in text
    assert re.search(rf"{re.escape(write_tokens(length.budget_tokens).value)}[*]?‡ ", text)
    assert text.count("‡ what is too rare") == 1
    assert text.count("and end the budget sooner") == 1
    without_budget = pair.model_copy(update={"length": None})
    assert "end the budget" not in printed(summary.model_copy(update={"pairs": [without_budget]}))


def test_a_command_to_copy_names_the_folder_of_the_run() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    advice = [
        "Look: mismatch-probe localize --run RUN --dtype bf16",
        "See: mismatch-probe headroom --run RUN",
        "Decide: mismatch-probe compare --out RUN --resume --dtype fp32",
    ]
    changed = pair.model_copy(update={"verdict": pair.verdict.model_copy(update={"advice": advice})})
    output = " ".join(printed(summary.model_copy(update={"pairs": [changed]}), width=400).split())
    assert "mismatch-probe localize --run 'runs/one two' --dtype bf16" in output
    assert "mismatch-probe headroom --run 'runs/one two'" in output
    assert "mismatch-probe compare --out 'runs/one two' --resume --dtype fp32" in output
    assert " RUN" not in output


def test_the_screen_says_how_large_how_long_who_errs_and_whether_fp16_fits(tmp_path: Path) -> None:
    summary = samples.summary(CROSSED)
    out = io.StringIO()
    console = Console(file=out, width=120, color_system=None)
    print_answer(answer_on_screen(summary, tmp_path), console)
    before = out.getvalue()
    assert "% of NeMo-RL's limit" in before.splitlines()[0]
    assert re.search(
        r"Length budget +\S+ tokens \(95 % interval: \S+ to \S+\) at ESS 0.5; the responses of this pair have "
        r".* at the median",
        before,
    )
    assert re.search(
        r"Weights +Pareto k-hat of the response weights \S+, \w+ \S+, the most for \d+ responses: their mean and ESS",
        before,
    )
    assert re.search(
        r"Who errs +the error against the reference is .*: the training path causes \d+ % of it, the",
        before,
    )
    blame = summary.pairs[0].blame
    assert blame is not None
    assert blame.rms_error_pi is not None
    assert blame.rms_error_mu is not None
    independence = re.search(
        r"Independence +two independent errors would make rms d √\((\S+)² \+ (\S+)²\) = (\S+) nats", before
    )
    assert independence is not None
    first, second, both = map(float, independence.groups())
    assert both == pytest.approx(np.hypot(first, second), rel=0.01)
    assert (first, second) == pytest.approx((blame.rms_error_pi.value, blame.rms_error_mu.value), rel=0.01)
    assert independence[1] == write_estimate(blame.rms_error_pi).value, "as the table has it"
    assert f"measured is {write_estimate(blame.rms_difference)}; the two errors correlate" in " ".join(before.split())
    assert "FP16  " not in before.partition("Who errs")[2]
    (tmp_path / "headroom.json").write_text(headroom().model_dump_json())
    print_answer(answer_on_screen(summary, tmp_path), console)
    assert f"FP16           {headroom().verdict.sentence}" in out.getvalue()


def test_advice_of_a_bug_stands_before_that_of_precision() -> None:
    summary = samples.summary(CROSSED)
    first, *others, last = summary.pairs
    look = first.verdict.model_copy(update={"advice": ["Look closer."]})
    bug = Verdict(kind="bug", code="stale_weights", sentence="The weights are old.", evidence=[], advice=["Push them."])
    pairs = [first.model_copy(update={"verdict": look}), *others, last.model_copy(update={"verdict": bug})]
    lines = printed(summary.model_copy(update={"pairs": pairs, "verdict": bug})).splitlines()
    assert lines[lines.index("Next") + 1 :] == ["  Push them.", "  Look closer."]


def test_a_setting_that_is_known_to_differ_is_the_first_line() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    known = (
        "rope_theta is 10000 on the training path and 50000 in the engine. The two sides treat positions differently."
    )
    bug = Verdict(kind="bug", code="positions", sentence=known, evidence=[], advice=[])
    pair = summary.pairs[0].model_copy(update={"verdict": bug})
    changed = summary.model_copy(update={"pairs": [pair], "verdict": bug, "headline": headline([pair], [])})
    assert printed(changed, width=200).split("\n")[0] == f"Bug: {known}"


@pytest.mark.parametrize("width", [80, 120])
def test_a_command_to_copy_is_never_broken(width: int) -> None:
    command = f"mismatch-probe localize --run {'a' * 120} --dtype bf16"
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    changed = pair.model_copy(update={"verdict": pair.verdict.model_copy(update={"advice": [f"See: `{command}`"]})})
    text = printed(summary.model_copy(update={"pairs": [changed]}), width=width, terminal=True)
    assert f"    {command}\n" in text


@pytest.mark.parametrize("width", [40, 80])
def test_a_path_a_flag_and_a_command_in_a_sentence_are_never_broken(width: int) -> None:
    path, command = f"/runs/{'a' * 60}/log.jsonl", "`mismatch-probe report runs/theirs --recompute --plotlyjs cdn`"
    advice = f"Give {path} again, with --some-long-flag-of-it or {command}, and look."
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    changed = pair.model_copy(update={"verdict": pair.verdict.model_copy(update={"advice": [advice]})})
    lines = printed(summary.model_copy(update={"pairs": [changed]}), width=width, terminal=True).splitlines()
    for unbroken in (path, "--some-long-flag-of-it", command):
        assert sum(unbroken in line for line in lines) == 1


def test_an_indented_line_keeps_its_indent_whether_it_fits_or_not() -> None:
    console = Console(file=io.StringIO(), width=20, force_terminal=True, color_system=None)
    print_line(console, "  short")
    print_line(console, "  " + "words of a line " * 3)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) > 3
    assert {len(line) - len(line.lstrip(" ")) for line in lines} == {2}


def test_a_sentence_that_several_pairs_share_is_said_once_with_the_command_of_each() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16)))
    pairs = [
        pair.model_copy(
            update={"verdict": pair.verdict.model_copy(update={"advice": [f"Decide: `mismatch-probe {n}`"]})}
        )
        for n, pair in enumerate(summary.pairs)
    ]
    lines = printed(summary.model_copy(update={"pairs": pairs})).splitlines()
    assert lines[lines.index("Next") + 1 :] == ["  Decide:", "    mismatch-probe 0", "    mismatch-probe 1"]


def test_one_response_that_is_void_is_not_many() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    counts = summary.pairs[0].counts.model_copy(update={"missing_mu": 1, "void_checks": 2})
    text = printed(summary.model_copy(update={"pairs": [summary.pairs[0].model_copy(update={"counts": counts})]}))
    assert "1 log-prob missing" in text
    assert "2 responses with void prefill" in text
