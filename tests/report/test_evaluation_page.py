"""The page of an evaluation says what deployment loses, and nothing where the intervals do not show it."""

import re
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.model import EvaluationSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.answers import (
    DirectAccuracy,
    EngineAccuracy,
    EngineDifference,
    Evaluation,
    EvaluationDirectory,
    PairAccuracy,
)
from mismatch_probe.report.page import Filed, render_html, write_report
from mismatch_probe.stats.results import Estimate
from tests.command_line import probe
from tests.report import samples
from tests.report.pages import drawings, traces
from tests.report.test_hostile import PAYLOADS
from tests.report.test_hostile_documents import assert_acts_not, attacked

PAIR: samples.Pairs = ((Dtype.BF16, Dtype.BF16),)


def estimate(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value, low, high, 0.95, 400, 12_000, "sequence", num_prompts=100)


ACCURACY = estimate(0.79, 0.72, 0.85)
SEEN, LOST, GAINED = estimate(0.001, -0.004, 0.006), estimate(0.03, 0.02, 0.04), estimate(-0.03, -0.04, -0.02)


def pair(dtype: Dtype, gap: Estimate | None = SEEN, **changes: Any) -> PairAccuracy:
    values: dict[str, Any] = {"train": dtype, "infer": dtype, "train_dtype": dtype, "infer_dtype": dtype}
    known = {"under_mu": ACCURACY, "ess": estimate(0.98, 0.97, 0.99), "under_pi": ACCURACY, "gap": gap}
    return PairAccuracy(**{**values, **known, "responses_left_out": 0, **changes})


def evaluation(*pairs: PairAccuracy, **changes: Any) -> Evaluation:
    engines = [
        EngineAccuracy(infer=each.infer, infer_dtype=each.infer_dtype, accuracy=ACCURACY, truncated_responses=3)
        for each in pairs
    ]
    found = Evaluation(
        tool_version="0",
        model="demo",
        model_fingerprint="0",
        task="sums",
        settings=EvaluationSettings(),
        state="finished",
        engines=engines,
        differences=[EngineDifference(of="bf16", over="fp16", difference=SEEN)] if len(pairs) > 1 else [],
        pairs=list(pairs),
    )
    return found.model_copy(update=changes)


def page_of(found: Evaluation) -> str:
    return render_html(samples.undrawn(samples.summary(PAIR)), samples.manifest(PAIR), Filed(evaluation=found))


def top(page: str) -> str:
    text = re.sub(r"<[^>]+>", " ", page[page.index("<header") : page.index("</header>")])
    return re.sub(r"\s+", " ", text)


def test_an_interval_that_holds_0_is_no_gap_and_says_what_would_have_been_seen() -> None:
    text = top(page_of(evaluation(pair(Dtype.BF16))))
    assert text.startswith(" ✓ no gap seen Accuracy under both policies of demo Trained in BF16, deployed in BF16:")
    assert "one beyond 0.00600 would have been seen" in text
    assert "loses" not in text.split("Accuracy of the engine")[0]


def test_no_gap_in_any_pair_is_one_sentence() -> None:
    text = top(page_of(evaluation(pair(Dtype.BF16), pair(Dtype.FP16, estimate(0, -0.02, 0.01)))))
    assert "No gap in accuracy seen in any of 2 pairs. One beyond 0.0200 would have been seen in each." in text


@pytest.mark.parametrize(("gap", "verb", "kind"), [(LOST, "loses", "bug"), (GAINED, "gains", "precision")])
def test_a_gap_that_is_seen_has_its_size_and_its_interval(gap: Estimate, verb: str, kind: str) -> None:
    page = page_of(evaluation(pair(Dtype.FP16), pair(Dtype.BF16, gap)))
    text = top(page)
    assert f"Trained in BF16, deployed in BF16: deployment {verb} 0.030 [0.020, 0.040] of accuracy." in text
    assert f"BF16: accuracy that deployment {verb} 0.030 [0.020, 0.040]; 0 is no gap" in text
    assert f'<span class="badge {kind}"><span aria-hidden="true">' in page[page.index("<header") :]


@pytest.mark.parametrize(
    "changes",
    [
        {"undecided": "weights pi/mu leave 8 %", "under_pi": None, "gap": None},
        {"gap": estimate(0.0, None, None)},
    ],
)
def test_what_cannot_be_told_is_not_told(changes: dict[str, Any]) -> None:
    text = top(page_of(evaluation(pair(Dtype.BF16, **changes))))
    assert text.startswith(" ? cannot be estimated")


def test_both_policies_stand_in_the_figure_with_their_intervals_and_counts() -> None:
    direct = DirectAccuracy(accuracy=ACCURACY, gap=SEEN, truncated_responses=0)
    found = drawings(page_of(evaluation(pair(Dtype.BF16), pair(Dtype.FP16, direct=direct))))
    assert len(traces(found["plot-accuracy"], mode="markers")) == 3
    [weighed, sampled] = traces(found["plot-gap"], mode="markers")
    assert (len(weighed["x"]), len(sampled["x"])) == (2, 1)
    assert weighed["error_y"]["array"] == [0.005, 0.005]
    assert weighed["hovertext"][0] == "BF16<br>gap, weighed<br>0.0010 [-0.0040, 0.0060]<br>400 responses, 12,000 tokens"


@pytest.mark.slow
def test_the_comparison_stands_below_and_the_page_is_written_once_it_is_finished(tmp_path: Path) -> None:
    run = EvaluationDirectory(tmp_path)
    run.write_summary(samples.undrawn(samples.summary(PAIR)))
    run.write_manifest(samples.manifest(PAIR))
    for state, is_there in (("unfinished", False), ("finished", True)):
        run.write_evaluation(evaluation(pair(Dtype.BF16), state=state))
        page = write_report(run).read_text(encoding="utf-8")
        assert ('id="accuracy"' in page) == ("<code>evaluation.json</code>" in page) == is_there
        assert 'id="verdicts"' in page
        output = probe("report", tmp_path).stdout
        assert output.startswith("Trained in BF16, deployed in BF16: no gap seen") == is_there
        assert output.index("KL (k3)") > (output.index("The mismatch behind it") if is_there else -1)


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_what_a_stranger_wrote_into_an_evaluation_is_text(payload: str) -> None:
    assert_acts_not(page_of(attacked(evaluation(pair(Dtype.BF16), pair(Dtype.FP16, undecided="x")), payload, least=5)))
