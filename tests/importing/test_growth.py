"""For a log with steps time is the axis: a KL that grows leads headline, colour, tiles, figure and advice."""

import json
from pathlib import Path

import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.notation import write_estimate
from mismatch_probe.records.findings import Explanation
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Verdict
from mismatch_probe.report.answers.compare import summary_of_run
from mismatch_probe.report.page import answer_on_screen, run_answer
from mismatch_probe.report.view import Answer
from mismatch_probe.stats.growth import StepLevels
from mismatch_probe.verdict.findings import with_findings
from mismatch_probe.verdict.growth import course_words
from mismatch_probe.verdict.headline import LOG_ENTROPY
from tests.command_line import probe
from tests.importing.imported import imported, pair_of
from tests.importing.logs import log_of_levels
from tests.report.test_answer_of_findings import DECLARED, HOT, explanation

pytestmark = pytest.mark.slow

LEVELS = (0.01, 0.012, 0.011, 0.013, 0.012, 0.9, 1.4, 2.0)
FLAT = (0.01, 0.012, 0.011, 0.013, 0.012, 0.009, 0.011, 0.012)
HEADLINE = "KL per token grew "


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("grown")
    return imported(folder, log_of_levels(folder / "log.jsonl", LEVELS))


@pytest.fixture(scope="module")
def answer(grown: RunDirectory) -> Answer:
    return run_answer(grown.read_summary(), grown.read_manifest())


def test_the_growth_is_recorded_and_stands_in_headline_and_evidence(grown: RunDirectory) -> None:
    pair, summary = pair_of(grown), grown.read_summary()
    assert pair.growth is not None
    assert pair.growth.ratio is not None
    assert (pair.growth.first_step, pair.growth.last_step, pair.growth.steepest_step) == (0, 7, 5)
    assert pair.growth.first == pair.steps[0].metrics["kl_k3"]
    assert pair.growth.last == pair.steps[-1].metrics["kl_k3"]
    assert pair.growth.ratio.value > 1000
    assert summary.headline.startswith(HEADLINE)
    assert "-fold from step 0 (" in summary.headline
    assert ", most at step 5 (" in summary.headline
    assert pair.verdict.evidence[0].startswith(HEADLINE)
    assert " times NeMo-RL's limit), most at step 5 (" in summary.headline
    assert "length budget" not in " ".join(pair.verdict.advice)


def test_screen_page_and_document_say_the_same(grown: RunDirectory, answer: Answer) -> None:
    summary = grown.read_summary()
    document = json.loads(probe("report", grown.path, "--json").stdout)
    assert document["headline"] == answer.headline == answer_on_screen(summary, grown.path).headline == summary.headline
    assert document["pairs"][0]["growth"]["steepest_step"] == 5


def test_its_colour_is_no_calm_one_and_its_sign_stands_with_the_pair(answer: Answer) -> None:
    assert answer.badge.kind in ("growing", "bug")
    assert answer.table is not None
    assert answer.table.rows[0][1] == answer.badge


def test_tiles_first_figure_and_first_section_are_the_course(answer: Answer) -> None:
    assert answer.tiles[0].label == "KL per token at step 7"
    assert answer.tiles[1].label == "Growth over the steps"
    assert "at step 5 alone" in answer.tiles[1].note
    assert answer.tiles[-1].value == "Look at step 5"
    assert answer.figure is not None
    assert answer.figure.panels[0].heading.anchor == "overview-steps"
    assert answer.sections[0].anchor == "steps"
    anchors = [panel.heading.anchor for panel in answer.figure.panels]
    assert len(set(anchors)) == len(anchors)


def test_the_first_advice_is_to_look_at_what_changed_and_no_dtype(grown: RunDirectory) -> None:
    summary = summary_of_run(grown.read_summary(), grown.path, [])
    advice = summary.verdict.advice
    assert advice[0].startswith("Look at what changed between step 4 and step 5: ")
    assert f"explain {grown.path} --model CHECKPOINT --step 5`" in advice[-1]
    assert not any("dtype" in line for line in advice)


def test_a_screen_has_the_steps(grown: RunDirectory) -> None:
    shown = probe("report", grown.path).stdout.splitlines()
    assert shown[0].startswith(HEADLINE)
    rows = [line.split() for line in shown if line.strip()[:1].isdigit()]
    assert [line[0] for line in rows[:8]] == [str(step) for step in range(8)]


def test_a_flat_noisy_log_keeps_its_headline(tmp_path: Path) -> None:
    run = imported(tmp_path, log_of_levels(tmp_path / "log.jsonl", FLAT))
    pair, summary = pair_of(run), run.read_summary()
    assert pair.growth is None
    assert summary.headline.startswith("Undecided: the log's sides differ by KL ")
    [pair] = summary.pairs
    sizes = [row.metrics["kl_k3"] for row in pair.steps]
    low, high = (write_estimate(extreme(sizes, key=lambda size: size.value)).value for extreme in (min, max))
    assert f", flat over 8 steps ({low} to {high})" in summary.headline, "as the table of the steps has them"
    assert pair.verdict.advice[0].endswith("explain RUN --model CHECKPOINT --step 7`")
    assert pair.verdict.advice[-1] == LOG_ENTROPY
    (declared,) = with_findings(summary, [explanation(DECLARED)]).pairs
    assert LOG_ENTROPY not in declared.verdict.advice
    answer = run_answer(summary, run.read_manifest())
    assert answer.badge.kind == "undecided"
    assert answer.figure is not None
    assert answer.figure.panels[0].heading.anchor == "overview-kl"
    assert answer.sections[0].anchor == "verdicts"
    assert [section.anchor for section in answer.sections].count("steps") == 1


def test_two_steps_are_never_called_flat() -> None:
    two = course_words(StepLevels([3, 4], [1e-4, 1e-4], [100, 100]))
    assert two == "1.00e-4 at step 3 and 1.00e-4 at step 4, too few steps to show a trend"
    assert course_words(StepLevels([3, 4, 5], [1e-4] * 3, [100] * 3)) == "flat over 3 steps (1.00e-4)"


def test_last_steps_beyond_all_rounding_are_a_bug_whose_cause_the_checkpoint_would_tell(grown: RunDirectory) -> None:
    """Over all steps mean abs(d) is 0.4, which rounding can make; at step 7 it is 1.2."""
    verdict, headline = pair_of(grown).verdict, grown.read_summary().headline
    assert (verdict.kind, verdict.code) == ("bug", Code.BEYOND_FORMAT)
    assert verdict.evidence[1].startswith("at step 7 mean abs(d) is ")
    assert "rounding in BF16 explains at most 0.500" in verdict.evidence[1]
    end = "Bug: at step 7 the two sides differ by more than BF16 can; the checkpoint would tell the cause."
    assert headline.endswith(end)


@pytest.mark.parametrize(
    ("last", "size"),
    [
        (0.25, "more than rounding in BF16 made where it was measured (0.064), less than the most it can make (0.5)"),
        (0.06, "a size that rounding in BF16 has too (up to 0.064 where it was measured)"),
    ],
)
def test_last_steps_that_rounding_may_have_made_say_how_large_they_are(tmp_path: Path, last: float, size: str) -> None:
    run = imported(tmp_path, log_of_levels(tmp_path / "log.jsonl", (*FLAT[:5], 0.8 * last, 0.9 * last, last)))
    assert pair_of(run).verdict.kind == "undecided"
    assert f" nats a token, {size}; the checkpoint would tell whether it is a bug." in run.read_summary().headline


def test_no_cause_computed_from_the_checkpoint_makes_no_rounding_of_the_last_steps(grown: RunDirectory) -> None:
    nothing = Verdict(kind="undecided", code="unexplained", sentence="Nothing that was computed explains this side.")
    summary = with_findings(grown.read_summary(), [explanation(nothing, 5)])
    assert summary.verdict.kind == "bug"
    assert summary.headline.endswith(
        "by more than BF16 can; no cause that was computed from the checkpoint explains it (explain)."
    )


@pytest.mark.parametrize(("step", "kind"), [(0, "bug"), (5, "bug")], ids=["before it grew", "where it grew"])
def test_what_explain_finds_does_not_hide_the_growth(grown: RunDirectory, step: int, kind: str) -> None:
    filed: list[Explanation] = [explanation(HOT, step)]
    summary = with_findings(grown.read_summary(), filed)
    assert summary.verdict.kind == kind
    assert summary.headline.startswith(HEADLINE)
    assert with_findings(summary, filed) == summary


def test_sides_as_declared_before_it_grew_do_not_make_rounding_of_what_came(grown: RunDirectory) -> None:
    pair = pair_of(grown)
    undecided = pair.verdict.model_copy(update={"kind": "undecided", "code": "unexplained"})
    pairs = [pair.model_copy(update={"verdict": undecided})]
    summary = grown.read_summary().model_copy(update={"pairs": pairs, "verdict": undecided})
    assert with_findings(summary, [explanation(DECLARED, 0)]).verdict.kind == "undecided"
    assert with_findings(summary, [explanation(DECLARED, 5)]).verdict.kind == "precision"
