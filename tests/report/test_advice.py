"""Advice as it can be followed: with the folder of the run, and not what was done already."""

import re
import shlex
from html import unescape
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.examinations import Headroom
from mismatch_probe.records.files import EVALUATION
from mismatch_probe.records.findings import Findings, Localization
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Verdict
from mismatch_probe.report.answers.compare import summary_of_run
from mismatch_probe.report.page import answer_on_screen, write_report
from mismatch_probe.report.rendering import _advice_markup
from mismatch_probe.verdict.headline import ADD_EXACT_PAIR, HEADROOM, localize_command
from tests.report import samples
from tests.report.documents import headroom, localization

BF16 = localize_command(Dtype.BF16, Dtype.BF16)
FP16 = localize_command(Dtype.FP16, Dtype.FP16)
ADVICE = [f"Fits: `{HEADROOM}`", f"Where: `{BF16} --modules`", f"Where: `{FP16}`", f"Decide: `{ADD_EXACT_PAIR}`"]


def advised() -> samples.Summary:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    verdict = summary.verdict.model_copy(update={"advice": ADVICE})
    pairs = [pair.model_copy(update={"verdict": verdict}) for pair in summary.pairs]
    return summary.model_copy(update={"verdict": verdict, "pairs": pairs})


@pytest.mark.parametrize(
    ("filed", "left"),
    [
        ([], [0, 1, 2, 3]),
        ([headroom()], [1, 2, 3]),
        ([localization(Dtype.BF16)], [0, 2, 3]),
        ([headroom(), localization(Dtype.BF16), localization(Dtype.FP16)], [3]),
    ],
)
def test_what_was_done_is_advised_no_more(filed: list[Headroom | Localization], left: list[int]) -> None:
    summary = summary_of_run(advised(), Path("runs/mine"), filed)
    expected = [ADVICE[number].replace("RUN", "runs/mine") for number in left]
    assert summary.verdict.advice == expected
    assert [pair.verdict.advice for pair in summary.pairs] == [expected]


def test_an_evaluation_goes_on_by_its_own_command(tmp_path: Path) -> None:
    (tmp_path / EVALUATION).touch()
    *_, decide = summary_of_run(advised(), tmp_path, []).verdict.advice
    assert decide == f"Decide: `mismatch-probe evaluate --out {tmp_path} --resume --dtype fp32`"


def test_the_next_step_of_an_undecided_evaluation_is_an_fp32_pair(tmp_path: Path) -> None:
    (tmp_path / EVALUATION).touch()
    decide = Verdict(kind="undecided", code="unexplained", sentence="Open.", advice=[ADVICE[3]])
    summary = samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),)))
    pairs = [pair.model_copy(update={"verdict": decide}) for pair in summary.pairs]
    undecided = summary.model_copy(update={"verdict": decide, "pairs": pairs, "contrasts": []})
    [next_step] = [tile for tile in answer_on_screen(undecided, tmp_path).tiles if tile.label == "Next step"]
    assert next_step.value == "Add an FP32 pair"


@pytest.mark.slow
def test_the_page_of_a_run_gives_commands_as_they_are_to_be_typed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "one two")
    with run.create():
        run.write_manifest(samples.manifest(((Dtype.BF16, Dtype.BF16),)))
        run.write_summary(advised())
    page = write_report(run).read_text()
    assert "<span>headroom</span>" in page
    assert "<span>RUN</span>" not in page
    Findings(run.path).write(headroom())
    assert "<span>headroom</span>" not in write_report(run).read_text()


@pytest.mark.parametrize("name", ["one two", "back`tick", "`both`", "lr-2e-4", "a'b", "x<y"])
def test_the_command_is_whole_whatever_the_folder_is_called(name: str) -> None:
    """On the page every word stands in a box of its own."""
    command = f"mismatch-probe headroom --run {shlex.quote(f'runs/{name}')}"
    shown = str(_advice_markup(f"Look whether 2e-4 fits: `{command}`"))
    [code] = re.findall(r"<code>(.*)</code>$", shown)
    assert unescape(re.sub(r"</?span>", "", code)) == command
    assert "2e-4</span> fits: <code>" in shown
