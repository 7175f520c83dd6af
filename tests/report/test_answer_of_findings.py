"""What `explain`, `localize` and `headroom` found of a run changes its answer: headline, tiles, advice and `--json`."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.config.model import ExplainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.examinations import HeadroomVerdict
from mismatch_probe.records.findings import Document, Explanation, Findings, SideExplanation, Trial
from mismatch_probe.records.summary import Cause, PairSummary, Summary, Verdict
from mismatch_probe.report.answers.compare import compare_answer, summary_of_run
from mismatch_probe.report.page import answer_on_screen
from mismatch_probe.report.screen import print_answer
from mismatch_probe.verdict.findings import with_findings
from mismatch_probe.verdict.headline import EXPLAIN, OTHER_WEIGHTS, explain_command, foremost
from tests.command_line import probe
from tests.report import samples
from tests.report.documents import headroom, localization
from tests.simulated_run import Simulation, simulated_run

BF16: samples.Pairs = ((Dtype.BF16, Dtype.BF16),)
OPEN = Verdict(
    kind="undecided",
    code="unexplained",
    sentence="The sides differ by KL 2.9e-4 a token; a log alone does not tell rounding from a bug.",
    evidence=["token KL (k3) 2.9e-4"],
    advice=[f"With the checkpoint each cause is computed: `{EXPLAIN}`"],
)
DECLARED = Verdict(kind="clean", code="as_declared", sentence="As declared: this side is what its settings give.")
HOT = Verdict(
    kind="bug",
    code="temperature",
    sentence="The engine's side (mu) departs from its declared settings: temperature 1.3.",
    evidence=["temperature 1.3 explains 97 % of the deviation (share of the mean square)"],
    advice=["Use one temperature."],
)


def judged(verdict: Verdict, *, is_logged: bool = True) -> Summary:
    summary = samples.undrawn(samples.summary(BF16))
    changes = {"verdict": verdict, "is_logged": is_logged, "blame": None}
    pairs: list[PairSummary] = [summary.pairs[0].model_copy(update=changes)]
    return summary.model_copy(update={"pairs": pairs, "verdict": verdict, "preflight": [], "contrasts": []})


def explanation(mu: Verdict, step: int | None = None) -> Explanation:
    sides = [
        SideExplanation(
            side=side, num_tokens=900, num_missing=0, floor_nats=1e-3, trials=[], explained_by=None, verdict=verdict
        )
        for side, verdict in (("mu", mu), ("pi", DECLARED))
    ]
    settings = {"model": {"path": "demo"}, **{side: {"dtype": "bf16", "temperature": 1.0} for side in ("mu", "pi")}}
    return Explanation(
        tool_version="0",
        step=step,
        settings=ExplainSettings.model_validate(settings),
        num_responses=16,
        num_tokens=1800,
        sides=sides,
        verdict=mu,
        seconds=1.0,
    )


def headline(summary: Summary, *filed: Document) -> str:
    known = with_findings(summary, filed)
    answer = compare_answer(known, filed)
    assert answer.headline == known.headline
    return known.headline


def test_a_log_whose_sides_are_as_declared_is_no_longer_undecided() -> None:
    summary = judged(OPEN)
    assert compare_answer(summary).headline.startswith("Undecided: ")
    known = with_findings(summary, [explanation(DECLARED)])
    assert known.verdict.kind == "precision"
    assert known.headline.startswith("No bug. ")
    assert known.headline.endswith("what its checkpoint and settings give (explain).")
    assert known.verdict.advice == []
    assert known.verdict.evidence[0].startswith("explain, with the checkpoint: As declared")


def test_a_departure_that_explain_names_is_the_bug() -> None:
    sentence = headline(judged(OPEN), explanation(HOT))
    assert sentence.startswith("Bug: the engine's side (mu) departs from its declared settings: temperature 1.3.")
    assert sentence.endswith("That is what explain found with the checkpoint.")
    known = with_findings(judged(OPEN), [explanation(HOT)])
    tiles = compare_answer(known, [explanation(HOT)]).tiles
    assert tiles[1].note == "found by explain, with the checkpoint"
    assert compare_answer(known).tiles[1].note == "seen in BF16"
    assert [tile.value for tile in tiles[1:]] == ["Temperature", "Use one temperature"]


@pytest.mark.parametrize("weights", [{}, {"7": "ckpt/7"}])
def test_the_command_with_both_weights_is_advised_until_it_was_run_with_both(weights: dict[str, str]) -> None:
    command = f"{explain_command(None)} {OTHER_WEIGHTS}"
    summary = judged(OPEN.model_copy(update={"advice": [f"Compare part by part: `{command}`"]}))
    [pair] = [pair.model_copy(update={"update_ratio": 12.0}) for pair in summary.pairs]
    summary = summary.model_copy(update={"pairs": [pair]})

    def known(verdict: Verdict) -> Summary:
        filed = explanation(verdict)
        settings = filed.settings.model_copy(update={"weights": weights})
        return with_findings(summary, [filed.model_copy(update={"settings": settings})])

    assert any(command in line for line in known(DECLARED).verdict.advice) is not bool(weights)
    nameless = Verdict(kind="undecided", code="unexplained", sentence="The engine's side departs, by no known cause.")
    assert ("the checkpoints before and after it would tell" in known(nameless).headline) is not bool(weights)


@pytest.mark.parametrize("update_ratio", [None, 12.0])
def test_what_explain_cannot_explain_stays_undecided_and_does_not_wait_for_a_checkpoint(
    update_ratio: float | None,
) -> None:
    summary = judged(OPEN)
    [pair] = [pair.model_copy(update={"update_ratio": update_ratio}) for pair in summary.pairs]
    summary = summary.model_copy(update={"pairs": [pair]})
    assert "would tell whether it is a bug" in compare_answer(summary).headline
    nameless = Verdict(kind="undecided", code="unexplained", sentence="The engine's side departs, by no known cause.")
    filed = explanation(nameless)
    settings = filed.settings.model_copy(update={"weights": {"7": "ckpt/7"}})
    sentence = headline(summary, filed.model_copy(update={"settings": settings}))
    assert sentence.startswith("Undecided: ")
    assert "would tell" not in sentence
    assert "no cause that was computed from the checkpoint explains it (explain)" in sentence


@pytest.mark.parametrize(("num_missing", "kind"), [(3, "precision"), (400, "undecided")])
def test_missing_log_probs_leave_the_verdict_on_the_others_where_they_are_few(num_missing: int, kind: str) -> None:
    sentence = f"The data is broken: {num_missing} log-probs are missing."
    missing = Verdict(kind="broken", code="missing_logprobs", sentence=sentence)
    filed = explanation(missing)
    sides = [
        side.model_copy(update={"num_missing": num_missing}) if side.verdict.code == missing.code else side
        for side in filed.sides
    ]
    known = with_findings(judged(OPEN), [filed.model_copy(update={"sides": sides})])
    assert known.verdict.kind == kind
    assert known.verdict.evidence[0] == f"explain, with the checkpoint: {sentence}"
    assert "the checkpoint would tell" not in known.headline


def test_of_several_steps_the_gravest_decides() -> None:
    filed = [explanation(DECLARED, 1), explanation(HOT, 2)]
    assert with_findings(judged(OPEN), filed).verdict.code == "temperature"


def test_sides_as_declared_do_not_undo_a_bug_that_their_difference_shows() -> None:
    bug = Verdict(kind="bug", code="positions", sentence="The two sides treat positions differently.")
    known = with_findings(judged(bug), [explanation(DECLARED)])
    assert (known.verdict.kind, known.verdict.code) == ("bug", "positions")
    assert any("As declared" in line for line in known.verdict.evidence)


def test_another_cause_than_explain_found_stays_named() -> None:
    bug = Verdict(kind="bug", code="label_offset", sentence="The labels are shifted.")
    known = with_findings(judged(bug), [explanation(HOT)])
    assert known.verdict.code == "temperature"
    assert [cause.code for cause in known.verdict.also] == ["label_offset"]


PERIOD = Verdict(kind="bug", code="period", sentence="One side errs once in every 32 places of the context, at 3.")
UNCERTAIN = Verdict(kind="undecided", code="unexplained", sentence="Unexplained: nothing that was computed fits.")
RANDOM = Verdict(kind="bug", code="not_repeatable", sentence="The engine's side does not agree with itself.")


def with_residuals(mu: Verdict, nats: tuple[float, float]) -> Explanation:
    """What each side leaves as declared, mu and pi."""
    filed = explanation(mu)
    trials = [
        Trial(departures=[], explained=0.0, residual_floors=1.0, residual_nats=size, standard_scores=0.0)
        for size in nats
    ]
    sides = [side.model_copy(update={"trials": [trial]}) for side, trial in zip(filed.sides, trials, strict=True)]
    return filed.model_copy(update={"sides": sides})


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        ((UNCERTAIN, DECLARED), "the engine lies 5.56 times as far from the checkpoint as rounding, by no cause"),
        (
            (DECLARED, UNCERTAIN),
            "the training path lies 5.56 times as far from the checkpoint as rounding, by no cause",
        ),
        ((UNCERTAIN, UNCERTAIN), "no cause that was computed from the checkpoint explains it (explain)"),
    ],
)
def test_the_side_that_alone_departs_from_the_checkpoint_is_named_without_a_cause(
    sides: tuple[Verdict, Verdict], words: str
) -> None:
    filed = with_residuals(UNCERTAIN, (0.1, 0.1))
    trial = filed.sides[0].trials[0].model_copy(update={"residual_floors": 5.56})
    own = [
        side.model_copy(update={"verdict": verdict, "trials": [trial]})
        for side, verdict in zip(filed.sides, sides, strict=True)
    ]
    sentence = headline(judged(OPEN), filed.model_copy(update={"sides": own}))
    assert words in sentence
    assert sentence.count("is as declared (explain)") == (DECLARED in sides)


@pytest.mark.parametrize("mu", [DECLARED, UNCERTAIN, RANDOM])
@pytest.mark.parametrize(
    ("nats", "who"), [((0.1, 0.01), "The engine"), ((0.01, 0.1), "The training path"), ((0.02, 0.018), "One side")]
)
def test_a_fault_at_places_stays_named_and_the_checkpoint_says_the_side(mu: Verdict, nats, who: str) -> None:
    known = with_findings(judged(PERIOD), [with_residuals(mu, nats)])
    assert known.verdict.code == "period"
    assert known.verdict.sentence.startswith(f"{who} errs once in every 32 places")
    assert any(line.startswith("explain, with the checkpoint: ") for line in known.verdict.evidence)
    again = with_findings(known, [with_residuals(mu, nats)])
    assert again.verdict == known.verdict


def test_a_departure_that_explain_computes_stands_before_a_fault_at_places() -> None:
    assert with_findings(judged(PERIOD), [with_residuals(HOT, (0.1, 0.01))]).verdict.code == "temperature"


@pytest.mark.parametrize("is_logged", [True, False])
def test_an_explanation_is_of_logged_sides_alone(is_logged: bool) -> None:
    known = with_findings(judged(OPEN, is_logged=is_logged), [explanation(HOT)])
    assert (known.verdict.kind == "bug") is is_logged


@pytest.mark.parametrize(
    ("infer", "of_mu", "code"),
    [("log", HOT, "temperature"), ("log", DECLARED, "beyond_format"), ("bf16", HOT, "beyond_format")],
)
def test_where_the_sampler_alone_was_logged_its_departure_is_the_cause(infer: str, of_mu: Verdict, code: str) -> None:
    """As after `score`, whose training path is held against the log's sampler."""
    beyond = Verdict(kind="bug", code="beyond_format", sentence="The engine's side errs by more than BF16 can.")
    summary = judged(beyond, is_logged=False)
    pairs = [summary.pairs[0].model_copy(update={"infer": infer})]
    known = with_findings(summary.model_copy(update={"pairs": pairs}), [explanation(of_mu)])
    assert (known.verdict.kind, known.verdict.code) == ("bug", code)
    assert [cause.code for cause in known.verdict.also] == (["beyond_format"] if code == "temperature" else [])


def test_broken_data_stays_broken() -> None:
    broken = Verdict(kind="broken", code="ids_differ", sentence="The data is broken: other token ids.")
    known = with_findings(judged(broken), [explanation(DECLARED), localization(suspect_layer=5), headroom()])
    assert known.verdict.kind == "broken"
    assert known.headline.count("(") == 1, "of three documents that of headroom, which says what it leaves open"


def test_a_suspect_makes_a_bug_of_what_was_open() -> None:
    summary, filed = judged(OPEN, is_logged=False), [localization(suspect_layer=5)]
    sentence = headline(summary, *filed)
    assert sentence.startswith("Bug: layer 5, mlp.down_proj of the engine errs otherwise than rounding does.")
    assert sentence.endswith("(localize).") or sentence.endswith("That is what localize found inside both sides.")
    known = with_findings(summary, filed)
    assert compare_answer(known, filed).tiles[1].value == "mlp.down_proj"


def test_no_suspect_is_evidence_and_decides_nothing() -> None:
    known = with_findings(judged(OPEN, is_logged=False), [localization()])
    assert known.verdict.kind == "undecided"
    assert known.verdict.evidence[-1] == "localize, inside both sides: no module errs otherwise than rounding does"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest", "answer", "words"),
    [(40.0, "yes", "fits FP16 with a loss scale"), (1e5, "no", "does not fit FP16")],
)
def test_whether_to_train_in_fp16_is_the_first_sentence(largest: float, answer: str, words: str) -> None:
    summary = samples.undrawn(samples.summary())
    filed = [headroom(largest)]
    known = with_findings(summary, filed)
    assert known.headline.startswith(f"Train in FP16: {answer}, the checkpoint {words} (headroom). No bug. ")
    [closest] = [
        tile for tile in compare_answer(known, filed).tiles if tile.label == "Closest 16-bit dtype in this run"
    ]
    assert closest.note.endswith(f"times closer in KL; the checkpoint {words}")


def _ratio(summary: Summary, low: float, high: float) -> Summary:
    """FP16 that is so many times closer than BF16."""
    ratios = [
        contrast.model_copy(update={"ratio": replace(contrast.ratio, low=low, high=high)})
        for contrast in summary.contrasts
    ]
    return summary.model_copy(update={"contrasts": ratios})


def _weights_alone() -> list[Document]:
    return [headroom().model_copy(update={"activations": None})]


def _without_gradient() -> list[Document]:
    verdict = HeadroomVerdict.of(HeadroomCode.GRADIENTS_NOT_MEASURED, [])
    return [headroom().model_copy(update={"verdict": verdict})]


BUG = Verdict(kind="bug", code="label_offset", sentence="The labels are shifted.")
BROKEN = Verdict(kind="broken", code="missing_logprobs", sentence="The data is broken: 3 log-probs are missing.")
FITS = "though the checkpoint fits FP16 with a loss scale (headroom)."


def test_more_prompts_are_the_first_advice_where_few_leave_fp16_open() -> None:
    summary = samples.undrawn(samples.summary())
    few, enough = (with_findings(_ratio(summary, low, 4000), [headroom()]) for low in (0.8, 1.5))
    assert few.verdict.advice[0].startswith("Whether FP16 is closer takes more prompts")
    assert with_findings(few, [headroom()]).verdict.advice == few.verdict.advice
    assert not any("more prompts" in advice for advice in enough.verdict.advice)
    assert foremost(few.pairs).verdict.advice[0] == few.verdict.advice[0]
    for summary, is_short in ((few, True), (enough, False)):
        steps = [tile.value for tile in compare_answer(summary, [headroom()]).tiles if tile.label == "Next step"]
        assert ("More prompts" in steps) is is_short


@pytest.mark.slow
def test_the_sentence_on_fp16_is_yes_no_or_undecided_in_every_case() -> None:
    summary, fits, does_not_fit = samples.undrawn(samples.summary()), [headroom()], [headroom(1e5)]
    no_fp32, refused = judged(OPEN, is_logged=False), "vLLM has no FP16 for it"
    not_asked_for = summary.model_copy(update={"contrasts": []})
    for changed, filed, end in (
        (_ratio(summary, 1.5, 4000), fits, "yes, the checkpoint fits FP16 with a loss scale (headroom)."),
        (_ratio(summary, 0.8, 1.5), fits, f"no, it shows no gain over BF16 here, {FITS}"),
        (_ratio(summary, 0.5, 0.9), fits, f"no, it shows no gain over BF16 here, {FITS}"),
        (_ratio(summary, 0.8, 4000), fits, f"undecided, 48 prompts are too few to tell whether it is closer, {FITS}"),
        (summary, _weights_alone(), "undecided, headroom looked at the weights alone; they fit FP16."),
        (
            summary,
            _without_gradient(),
            "undecided, headroom's responses leave next to no gradient to measure; weights and activations fit FP16.",
        ),
        (not_asked_for, fits, f"undecided without a pair in BF16 and one in FP16, {FITS}"),
        (no_fp32, fits, f"undecided until a bug is ruled out, {FITS}"),
        (judged(BUG, is_logged=False), fits, f"undecided until the bug is fixed, {FITS}"),
        (judged(BROKEN, is_logged=False), fits, f"undecided until the data is sound, {FITS}"),
        (judged(BUG, is_logged=False), does_not_fit, "no, the checkpoint does not fit FP16 (headroom)."),
        (no_fp32, does_not_fit, "no, the checkpoint does not fit FP16 (headroom)."),
        (
            summary.model_copy(update={"left_out": {"fp16": refused}}),
            fits,
            "no, the engine refuses this checkpoint in FP16.",
        ),
        (no_fp32.model_copy(update={"fp16_refused": refused}), fits, "no, the engine refuses this checkpoint in FP16."),
    ):
        known = with_findings(changed, filed)
        sentence, waits = known.headline, known.verdict.kind in ("bug", "broken")
        assert sentence.endswith(f" Train in FP16: {end}") is waits
        assert sentence.startswith(f"Train in FP16: {end} ") is not waits
        assert sentence.count("Train in FP16") == 1
    assert "Train in FP16" not in with_findings(summary, []).headline


def test_what_fixes_most_takes_the_place_of_the_next_step() -> None:
    precision = Cause(code="precision", sentence="Precision: the sides differ by KL 2.9e-4 a token.")
    summary = judged(Verdict(kind="precision", **precision.model_dump()), is_logged=False)
    filed = [localization()]
    assert compare_answer(with_findings(summary, filed), filed).tiles[-1].value == "41 % (37 to 45)"


def test_twice_is_as_once() -> None:
    for summary in (judged(OPEN), judged(HOT)):
        for filed in ([explanation(DECLARED)], [explanation(HOT), localization(suspect_layer=5), headroom()]):
            once = with_findings(summary, filed)
            assert with_findings(once, filed) == once


@pytest.mark.slow
def test_screen_page_and_document_say_the_same(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=24, mean_length=30), with_summary=True)
    Findings(run.path).write(headroom(1e5))
    console = Console(file=io.StringIO(), width=400, color_system=None)
    print_answer(answer_on_screen(run.read_summary(), run.path), console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()[0]
    document = json.loads(probe("report", run.path, "--json").stdout)
    assert shown == document["headline"]
    assert shown.startswith("Train in FP16: no, the checkpoint does not fit FP16 (headroom). ")
    assert run.report_path.read_text(encoding="utf-8").count("does not fit FP16 (headroom)") == 1
    assert not any("headroom --run" in line for line in document["verdict"]["advice"])
    assert summary_of_run(run.read_summary(), run.path, [headroom(1e5)]).headline == shown


def test_that_prompts_are_few_comes_behind_what_explain_found() -> None:
    """Before, "That is what explain found" stood behind the sentence on the prompts."""
    summary = judged(OPEN)
    kl = replace(summary.pairs[0].metrics["kl_k3"], num_prompts=3)
    pair = summary.pairs[0].model_copy(update={"metrics": summary.pairs[0].metrics | {"kl_k3": kl}})
    headline = with_findings(summary.model_copy(update={"pairs": [pair]}), [explanation(HOT)]).headline
    found, few = (
        "That is what explain found with the checkpoint.",
        "3 prompts only: whether others show it too is open.",
    )
    assert headline.endswith(f"{found} {few}")
