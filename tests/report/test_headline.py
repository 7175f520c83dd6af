"""The one sentence that a page and a terminal open with: right and short for every kind of verdict."""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import Cause, PairSummary, SettingFinding, SettingsContrast, Summary, Verdict
from mismatch_probe.report.answers.compare import summary_of_run
from mismatch_probe.report.page import answer_on_screen, run_answer
from mismatch_probe.report.screen import print_answer
from mismatch_probe.verdict.headline import headline, most_serious_first
from tests.report import samples

BF16: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))
ROPE = SettingFinding(
    level="error",
    setting="rope_parameters.rope_theta",
    what="rope_theta is 10000 on the training path and 50000 in the engine",
    advice="Give both sides the same checkpoint config.",
    code=Code.POSITIONS,
)
POSITIONS = "The two sides treat positions differently: the deviation grows along the response."
MOST_CHARACTERS = 130


def judged(cause: Cause, kind: str, **changed: object) -> PairSummary:
    """A pair of BF16 whose KL is 9.7e-5, with this verdict."""
    pair = samples.undrawn(samples.summary(BF16)).pairs[0]
    kl = samples.replace(pair.metrics["kl_k3"], value=9.7e-5, low=9.2e-5, high=10.2e-5)
    verdict = Verdict.model_validate({**cause.model_dump(), "kind": kind, "also": changed.pop("also", [])})
    return pair.model_copy(update={"verdict": verdict, "metrics": pair.metrics | {"kl_k3": kl}, **changed})


def cause(code: str, sentence: str, *evidence: str) -> Cause:
    return Cause(code=code, sentence=sentence, evidence=list(evidence))


AGREE = cause("clean", "Clean: the two sides agree to 2.3e-8 nats a token.")
CLEAN = judged(AGREE, "clean", train="fp32", infer="fp32")
BEYOND = cause("beyond_format", "This is a bug, not precision: the engine's side errs by more than BF16 can.")
LOST = cause("missing_logprobs", "The data is broken: 7 log-probs are missing on the training path.")
PRECISION = cause("precision", "Precision: the sides differ by KL 9.7e-5 a token, and agree in FP32.")
OPEN = cause("unexplained", "The sides differ by KL 9.7e-5 a token; without an FP32 pair it may be a bug.")
SETTINGS = SettingsContrast(counterpart=("bf16", "bf16"), side="mu", settings=["kv_cache_dtype = fp8"], ratios={})

ANSWERS = [
    (
        judged(cause("positions", POSITIONS, "d grows", ROPE.what), "bug"),
        "Bug: rope_theta is 10000 on the training path and 50000 in the engine.",
    ),
    (
        judged(cause("positions", f"The two sides are set differently: {ROPE.what}."), "bug"),
        "Bug: rope_theta is 10000 on the training path and 50000 in the engine.",
    ),
    (
        judged(cause("positions", POSITIONS, "d grows"), "bug"),
        "Bug: the two sides treat positions differently: the deviation grows along the response.",
    ),
    (
        judged(BEYOND, "bug"),
        "Bug: the engine's side errs by more than BF16 can.",
    ),
    (
        judged(LOST, "broken"),
        "Broken data: 7 log-probs are missing on the training path.",
    ),
    (
        judged(cause("shifted", "the training path's log-probs stand one token too early: shift the column"), "broken"),
        "Broken data: the training path's log-probs stand one token too early: shift the column.",
    ),
    (CLEAN, "No bug. The two sides agree to 2.3e-8 nats a token."),
    (judged(PRECISION, "precision"), "No bug. BF16 rounding costs KL 9.7e-5 a token, 10 % of NeMo-RL's limit."),
    (
        judged(cause("settings", "Settings: …"), "precision", infer="fp8kv", settings_contrast=SETTINGS),
        "No bug. The FP8 KV cache costs KL 9.7e-5 a token.",
    ),
    (
        judged(cause("routing", "Expert routing: …"), "precision"),
        "No bug. Experts chosen otherwise by rounding in BF16 cost KL 9.7e-5 a token, 10 % of NeMo-RL's limit.",
    ),
    (
        judged(OPEN, "undecided"),
        "Undecided: BF16 differs from the engine by KL 9.7e-5 a token, 10 % of NeMo-RL's limit; no FP32 pair was run "
        "to rule out a bug.",
    ),
    (
        judged(OPEN, "undecided", is_logged=True),
        "Undecided: the log's sides differ by KL 9.7e-5 a token, 10 % of NeMo-RL's limit; the checkpoint "
        "would tell whether it is a bug.",
    ),
    (
        judged(OPEN, "undecided", is_logged=True, update_ratio=10.8),
        "Undecided: the log's sides differ by KL 9.7e-5 a token, 10 % of NeMo-RL's limit; d is 10.8 times as large "
        "before the last recorded change of the weights as after it; the checkpoints before and after it would tell "
        "whether it is a bug.",
    ),
    (
        judged(OPEN, "undecided", is_logged=True, update_ratio=0.2),
        "Undecided: the log's sides differ by KL 9.7e-5 a token, 10 % of NeMo-RL's limit; d is 5 times as large after "
        "the last recorded change of the weights as before it; the checkpoints before and after it would tell whether "
        "it is a bug.",
    ),
    (
        judged(cause("other_checkpoint", "The checkpoint is not the one that made this log."), "undecided"),
        "Undecided: the checkpoint is not the one that made this log.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("pair", "answer"), ANSWERS, ids=[pair.verdict.code for pair, _ in ANSWERS])
def test_every_kind_of_verdict_has_its_answer(pair: PairSummary, answer: str) -> None:
    assert headline([pair], [], [ROPE]) == answer
    assert len(answer) <= MOST_CHARACTERS or pair.verdict.kind == "undecided"


def test_a_setting_that_differs_without_being_the_cause_is_not_named() -> None:
    pair = judged(cause("temperature", "The two sides use different temperatures."), "bug")
    assert headline([pair], [], [ROPE]) == "Bug: the two sides use different temperatures."


EPSILON = ROPE.model_copy(update={"setting": "rms_norm_eps", "what": "rms_norm_eps is 1e-05 here and 0.001 there"})


def test_all_that_is_known_to_differ_is_named() -> None:
    first = cause("positions", f"The two sides are set differently: {ROPE.what}.")
    second = cause("configuration", f"The two sides are set differently: {EPSILON.what}.")
    assert headline([judged(first, "bug", also=[second])], [], [ROPE, EPSILON]) == (
        f"Bug: {ROPE.what}; {EPSILON.what}."
    )


def test_what_is_known_to_differ_is_told_of_a_sound_pair_too() -> None:
    template = ROPE.model_copy(update={"what": "the chat templates of a and b differ", "level": "warning"})
    shown = f"{template.what}, which these numbers do not show"
    for cause_of, kind, opening in (
        (PRECISION, "precision", "No bug. "),
        (AGREE, "clean", "No bug. "),
        (OPEN, "undecided", "Undecided: "),
    ):
        text = headline([judged(cause_of.model_copy(update={"evidence": [shown]}), kind)], [], [template])
        assert text.startswith(opening)
        assert text.endswith("; but the chat templates of a and b differ.")
        assert "but" not in headline([judged(cause_of, kind)], [], [template])


def test_the_pair_is_named_where_others_are_sound() -> None:
    bug = judged(cause("positions", POSITIONS, ROPE.what), "bug")
    assert headline([bug, CLEAN], [], [ROPE]).startswith("Bug in BF16: rope_theta is ")
    other = bug.model_copy(update={"infer": "fp16"})
    assert headline([CLEAN, bug, other], [], [ROPE]).startswith("Bug in BF16 and 1 more: rope_theta is ")


def test_the_pair_of_the_largest_kl_among_the_undecided_is_told() -> None:
    """Whatever a pair that is known to be sound costs."""
    known = judged(PRECISION, "precision", infer="fp16")
    known = known.model_copy(
        update={"metrics": {"kl_k3": samples.replace(known.metrics["kl_k3"], value=0.5, low=0.4, high=0.6)}}
    )
    assert headline([known, judged(OPEN, "undecided")], []).startswith("Undecided: BF16 differs ")


def test_the_bug_of_the_largest_kl_leads_page_and_terminal(tmp_path: Path) -> None:
    """Whatever the record of an earlier version calls the verdict of the run."""
    small, large = two_bugs()
    summary = samples.undrawn(samples.summary(BF16))
    pairs = [small, large, CLEAN]
    summary = summary.model_copy(update={"pairs": pairs, "verdict": small.verdict, "contrasts": []})
    shown = summary_of_run(summary, tmp_path, [])
    top = run_answer(shown, samples.manifest(BF16))
    assert top.headline == "Bug in FP16 and 1 more: the labels are off by one."
    assert top.tiles[0].label == "FP16: KL per token"
    assert top.tiles[1].value == "Label offset"
    assert top.advice == ["Shift the labels."]
    text = printed(summary, tmp_path)
    assert text.index("Bug in FP16 and 1 more") < text.index("Shift the labels.") < text.index("Use one temperature.")


def test_broken_data_is_told_in_its_order() -> None:
    """Its numbers mean nothing."""
    small, large = (pair.model_copy(update={"verdict": broken(pair.verdict)}) for pair in two_bugs())
    assert most_serious_first([small, large]) == [small, large]
    assert most_serious_first([large, small]) == [large, small]


def two_bugs() -> tuple[PairSummary, PairSummary]:
    """Of BF16, and of FP16 with a KL of 0.5."""
    small = judged(advised("temperature", "The two sides use different temperatures.", "Use one temperature."), "bug")
    large = judged(advised("label_offset", "The labels are off by one.", "Shift the labels."), "bug")
    kl = samples.replace(large.metrics["kl_k3"], value=0.5, low=0.4, high=0.6)
    return small, large.model_copy(update={"train": "fp16", "infer": "fp16", "metrics": {"kl_k3": kl}})


def advised(code: str, sentence: str, advice: str) -> Cause:
    return cause(code, sentence).model_copy(update={"advice": [advice]})


def broken(verdict: Verdict) -> Verdict:
    return verdict.model_copy(update={"kind": "broken"})


def test_a_run_that_is_known_by_its_record_alone_names_the_cause_on_page_and_terminal(tmp_path: Path) -> None:
    """As one of an earlier version, whose own headline is the sentence of its verdict."""
    pair = judged(cause("positions", POSITIONS, ROPE.what), "bug")
    summary = samples.undrawn(samples.summary(BF16)).model_copy(
        update={"pairs": [pair], "verdict": pair.verdict, "headline": POSITIONS, "preflight": [ROPE], "contrasts": []}
    )
    answer = "Bug: rope_theta is 10000 on the training path and 50000 in the engine."
    assert run_answer(summary, samples.manifest(BF16)).headline == answer
    assert printed(summary, tmp_path).strip().splitlines()[0] == answer


def printed(summary: Summary, run: Path) -> str:
    stream = StringIO()
    print_answer(answer_on_screen(summary, run), Console(file=stream, width=200))
    return re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())


def of_prompts(number: int, low: float | None, high: float | None, kind: str = "precision") -> str:
    pair = judged(OPEN if kind == "undecided" else PRECISION, kind)
    kl = samples.replace(pair.metrics["kl_k3"], num_prompts=number, low=low, high=high)
    return headline([pair.model_copy(update={"metrics": pair.metrics | {"kl_k3": kl}})], [])


def test_rounding_of_a_log_is_that_of_its_sides() -> None:
    pair = judged(PRECISION, "precision").model_copy(update={"is_logged": True})
    assert headline([pair], []).startswith("No bug. Rounding of the log's sides costs KL ")


def test_few_prompts_with_a_wide_interval_have_a_word_of_it() -> None:
    end = " 8 prompts only: the KL is in [4.0e-5, 1.60e-4]; more prompts narrow it."
    for kind in ("precision", "undecided"):
        assert of_prompts(8, 4e-5, 1.6e-4, kind).endswith(f".{end}")
    for unbounded in (of_prompts(3, 4e-5, 50.0), of_prompts(1, None, None)):
        assert unbounded.endswith(" only, too few to bound the KL.")
    assert "3 prompts only: the KL is in " in of_prompts(3, 7e-5, 1.3e-4)
    for narrow in (of_prompts(8, 7e-5, 1.3e-4), of_prompts(64, 4e-5, 1.6e-4)):
        assert "only" not in narrow
