"""The three large numbers at the top of a page: of the worst pair, against what is published and what is there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import ABSENT
from mismatch_probe.records.files import EVALUATION
from mismatch_probe.records.log_readings import TurnReading
from mismatch_probe.records.manifest import LogOrigin
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import SettingFinding, SettingsContrast, Summary, Verdict
from mismatch_probe.report.answers.compare import compare_answer, compare_tiles, summary_of_run
from mismatch_probe.report.page import run_answer
from mismatch_probe.report.pairs import budget, settings_sentences
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.headline import ADD_EXACT_PAIR, EXPLAIN, HEADROOM
from tests.report import samples

PAIRS: samples.Pairs = ((Dtype.FP16, Dtype.FP16), (Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))


@pytest.fixture(scope="module")
def summary() -> Summary:
    return samples.undrawn(samples.summary(PAIRS))


@pytest.fixture(scope="module")
def drawn() -> Summary:
    return samples.summary(PAIRS)


def with_kl(summary: Summary, kl: float) -> Summary:
    """Of the pair of BF16."""
    pairs = [
        pair.model_copy(update={"metrics": pair.metrics | {"kl_k3": samples.replace(pair.metrics["kl_k3"], value=kl)}})
        if pair.infer == "bf16"
        else pair
        for pair in summary.pairs
    ]
    return summary.model_copy(update={"pairs": pairs})


def test_the_worst_pair_is_set_against_the_published_limit(summary: Summary) -> None:
    size = compare_tiles(with_kl(summary, 2.5e-4))[0]
    assert size.label == "BF16: KL per token"
    assert size.note == "25 % of NeMo-RL's limit (0.001)"


def test_beyond_the_limit_it_is_so_many_times_the_limit(summary: Summary) -> None:
    assert compare_tiles(with_kl(summary, 0.012))[0].note == "12 times NeMo-RL's limit (0.001)"
    assert compare_tiles(with_kl(summary, 48.81))[0].note == "48,800 times NeMo-RL's limit (0.001)"


def test_the_length_budget_is_set_against_the_responses_of_the_run(drawn: Summary) -> None:
    [pair] = [pair for pair in drawn.pairs if pair.infer == "bf16"]
    assert pair.length is not None
    assert pair.length.budget_tokens is not None
    times = pair.length.budget_tokens.value / pair.length.median_response
    [length] = [tile for tile in compare_tiles(drawn) if tile.label == "Length budget at ESS 0.5"]
    assert float(length.note.split("; ")[1].split(" times")[0]) == pytest.approx(times, rel=0.05)


def test_how_often_the_budget_holds_the_median_response_is_no_more_exact_than_the_budget(drawn: Summary) -> None:
    pairs = []
    for pair in drawn.pairs:
        assert pair.length is not None
        law = samples.replace(
            pair.length,
            median_response=15.0,
            budget_tokens=samples.replace(pair.metrics["kl_k3"], value=4155.0, low=1000.0, high=9000.0),
        )
        pairs.append(pair.model_copy(update={"length": law}))
    [length] = [tile for tile in compare_tiles(drawn.model_copy(update={"pairs": pairs})) if "budget" in tile.label]
    assert length.note == "[1,000, 9,000]; 270 times its median response, 15 tokens"


def test_a_closer_dtype_is_named_only_where_it_surely_is_closer(drawn: Summary) -> None:
    [closer] = [tile for tile in compare_tiles(drawn) if tile.label == "Closest 16-bit dtype in this run"]
    assert closer.value == "FP16"
    unsure = [
        contrast.model_copy(update={"ratio": samples.replace(contrast.ratio, low=0.9)}) for contrast in drawn.contrasts
    ]
    assert "Closest 16-bit dtype in this run" not in [
        tile.label for tile in compare_tiles(drawn.model_copy(update={"contrasts": unsure}))
    ]


def judged(summary: Summary, kind: str, *codes: str) -> Summary:
    """With a verdict of this kind on the first pairs, one code each."""
    verdicts = [
        summary.verdict.model_copy(update={"kind": kind, "code": code, "sentence": "Another answer."}) for code in codes
    ]
    changed = [
        pair.model_copy(update={"verdict": verdict}) for pair, verdict in zip(summary.pairs, verdicts, strict=False)
    ]
    pairs = [*changed, *summary.pairs[len(codes) :]]
    return summary.model_copy(update={"verdict": verdicts[0], "pairs": pairs})


def test_broken_data_has_no_tiles_since_its_numbers_are_no_measurement(drawn: Summary) -> None:
    other = judged(drawn, "broken", "missing_logprobs")
    assert compare_tiles(other) == []
    assert run_answer(other, samples.manifest(PAIRS)).headline.endswith("another answer.")


def test_a_bug_has_its_size_its_cause_and_what_fixes_it_but_no_length_budget(drawn: Summary) -> None:
    size, cause, fix = compare_tiles(judged(drawn, "bug", "label_offset", "label_offset"))
    assert size.label == "BF16: KL per token"
    assert size.note.endswith("NeMo-RL's limit (0.001)")
    assert (cause.label, cause.value) == ("Cause", "Label offset")
    assert cause.note == "seen in FP16 and BF16, 2 of 3 pairs"
    assert (fix.label, fix.value) == ("Next step", "Shift the labels")


def test_other_causes_in_other_pairs_are_not_passed_over(drawn: Summary) -> None:
    cause = compare_tiles(judged(drawn, "bug", "adapter", "stale_weights"))[1]
    assert cause.value == "Stale weights"
    assert cause.note == "seen in BF16, 1 of 3 pairs; other pairs have other causes"


@pytest.mark.parametrize("code", ["unexplained", "beyond_format", "a_code_of_another_version"])
def test_a_bug_without_a_name_claims_none(code: str, summary: Summary) -> None:
    _, cause, fix = compare_tiles(judged(summary, "bug", code))
    assert cause.value == ("A code of another version" if code.startswith("a_") else "Not known yet")
    assert fix.value.startswith("Look ")


@pytest.mark.parametrize("code", [code for code in Code if code.kind == "bug"])
def test_every_bug_that_is_named_has_a_fix(code: Code, summary: Summary) -> None:
    fix = compare_tiles(judged(summary, "bug", code.value))[2]
    assert fix.value.startswith("Look ") == (code is Code.BEYOND_FORMAT)


def test_an_undecided_evaluation_goes_on_by_its_own_command(drawn: Summary, tmp_path: Path) -> None:
    (tmp_path / EVALUATION).touch()
    verdict = drawn.verdict.model_copy(
        update={"kind": "undecided", "code": "undecided", "advice": [f"Decide: `{ADD_EXACT_PAIR}`"]}
    )
    pairs = [pair.model_copy(update={"verdict": verdict}) for pair in drawn.pairs]
    undecided = drawn.model_copy(update={"pairs": pairs, "contrasts": []})
    evaluated = summary_of_run(undecided, tmp_path, [])
    assert evaluated.verdict.advice == [f"Decide: `mismatch-probe evaluate --out {tmp_path} --resume --dtype fp32`"]
    assert compare_tiles(evaluated)[-1] == compare_tiles(undecided)[-1]
    assert compare_tiles(evaluated)[-1].value == "Add an FP32 pair"


def test_sides_that_agree_have_nothing_left_to_do(drawn: Summary) -> None:
    shown = compare_tiles(judged(drawn, "clean", "clean", "clean", "clean"))
    assert [tile.label.partition(":")[2] or tile.label for tile in shown] == [
        " KL per token",
        "Length budget at ESS 0.5",
        "Next step",
    ]
    assert shown[-1].value == "None"


@pytest.mark.parametrize(
    ("command", "value"),
    [(ADD_EXACT_PAIR, "Add an FP32 pair"), (EXPLAIN, "Explain the log"), (HEADROOM, "Examine FP16")],
)
def test_where_no_dtype_is_closer_the_next_step_is_the_first_command(
    command: str, value: str, summary: Summary
) -> None:
    verdict = summary.verdict.model_copy(update={"kind": "undecided", "advice": ["Look.", f"Do: `{command}`"]})
    pairs = [summary.pairs[0].model_copy(update={"verdict": verdict})]
    other = summary.model_copy(update={"verdict": verdict, "pairs": pairs, "contrasts": []})
    assert compare_tiles(other)[-1].value == value


@pytest.mark.parametrize(("num_broken", "advice"), [(0, 0), (3, 1)])
def test_where_only_turns_are_broken_the_next_step_measures_what_that_costs(
    num_broken: int, advice: int, summary: Summary, tmp_path: Path
) -> None:
    """As of a log that was explained with its checkpoint: the command on the joined turns is the only one left."""
    turns = TurnReading(num_trajectories=4, num_turns=9, num_broken=num_broken, num_joined=num_broken)
    log = LogOrigin(
        format="plain", files=[], num_responses=13, num_tokens=99, num_sampled_tokens=99, analysed_responses=13,
        analysed_tokens=99, turns=turns,
    )  # fmt: skip
    run = RunDirectory(tmp_path / "run")
    with run.create():
        run.write_manifest(samples.manifest(PAIRS).model_copy(update={"log": log}))
    verdict = summary.verdict.model_copy(update={"kind": "precision", "advice": []})
    pairs = [summary.pairs[0].model_copy(update={"verdict": verdict})]
    explained = summary.model_copy(update={"verdict": verdict, "pairs": pairs, "contrasts": []})
    shown = summary_of_run(explained, run.path, [])
    assert len(shown.pairs[0].verdict.advice) == advice
    steps = [tile.value for tile in compare_tiles(shown) if tile.label == "Next step"]
    assert steps == ["Import the joined turns"] * advice


def test_a_bug_has_no_length_budget_in_the_table_either(drawn: Summary) -> None:
    pairs = judged(drawn, "bug", "label_offset").pairs
    assert [budget(pair).value == ABSENT for pair in pairs] == [True, False, False]


def test_the_page_does_not_say_no_bug_while_another_pair_is_undecided(summary: Summary) -> None:
    """The pair of the largest KL is told by precision, another one by nothing."""
    open_question = summary.verdict.model_copy(
        update={"kind": "undecided", "code": "unexplained", "sentence": "It may be a bug."}
    )
    pairs = [
        pair.model_copy(update={"verdict": open_question}) if pair.infer == "fp16" else pair for pair in summary.pairs
    ]
    other = with_kl(summary.model_copy(update={"pairs": pairs, "verdict": open_question}), 0.5)
    assert run_answer(other, samples.manifest(PAIRS)).headline.startswith("Undecided: FP16 differs ")


def test_the_page_opens_with_whether_it_is_a_bug(summary: Summary) -> None:
    headline = run_answer(with_kl(summary, 2.5e-4), samples.manifest(PAIRS)).headline
    assert re.match(r"No bug\. BF16 rounding costs KL 2\.50?e-4 a token, 25 % of NeMo-RL's limit", headline)


def test_a_setting_that_is_the_answer_has_a_tile(summary: Summary) -> None:
    contrast = SettingsContrast(
        counterpart=("bf16", "bf16"),
        side="mu",
        settings=["kv_cache_dtype = fp8"],
        ratios={"kl_k3": Estimate(21, 6, 52, 0.95, 24, 1000, "token", 24)},
        format="FP8",
        is_rounding=True,
    )
    verdict = Verdict(kind="precision", code=Code.SETTINGS, sentence="Settings: …")
    pair = summary.pairs[1].model_copy(update={"infer": "fp8kv", "verdict": verdict, "settings_contrast": contrast})
    size, setting, *_ = compare_tiles(summary.model_copy(update={"pairs": [pair]}))
    assert size.label == "train BF16 / infer fp8kv: KL per token"
    assert (setting.label, setting.value) == ("The FP8 KV cache", "21 times")
    assert setting.note == "[6, 52] times the KL of the same pair without it, as rounding to FP8 can"


def test_two_estimates_of_one_kl_that_do_not_meet_are_remarked(drawn: Summary) -> None:
    pair = drawn.pairs[0]
    kl = pair.metrics["kl_k3"]
    apart = replace(kl, value=9 * kl.value, low=8 * kl.value, high=10 * kl.value)
    for k1, num_tiles in ((apart, 1), (kl, 0)):
        metrics = pair.metrics | {"kl_k1": k1}
        summary = drawn.model_copy(update={"pairs": [pair.model_copy(update={"metrics": metrics})], "contrasts": []})
        remarks = [remark for remark in compare_answer(summary).remarks if "their intervals do not meet" in remark]
        assert len(remarks) == num_tiles


def test_what_makes_two_estimates_of_one_kl_differ_is_said(drawn: Summary) -> None:
    """Token by token k3 is k1 plus the ratio less 1."""
    pair = drawn.pairs[0]
    k3, ratio = pair.metrics["kl_k3"], pair.metrics["is_ratio_mean_token"]
    high = replace(k3, value=0.031, low=0.03, high=0.032)
    low = replace(ratio, value=0.97, low=0.96, high=0.98)
    metrics = pair.metrics | {"kl_k1": high, "kl_k3": replace(k3, value=0.001, low=9e-4, high=0.0011)}
    for of_token, num_tiles in (
        (low, "a cut vocabulary"),
        (replace(low, value=1.03, low=1.02, high=1.04), "not draws from mu"),
        (replace(low, value=0.9999, low=0.99981, high=0.99999), "it may be chance"),
    ):
        pairs = [pair.model_copy(update={"metrics": metrics | {"is_ratio_mean_token": of_token}})]
        remarks = compare_answer(drawn.model_copy(update={"pairs": pairs, "contrasts": []})).remarks
        [remark] = [remark for remark in remarks if "their intervals do not meet" in remark]
        assert f"that ratio is {of_token.value:g}" in remark
        assert num_tiles in remark


@pytest.mark.parametrize(("token", "is_remarked"), [((0.99, 1.01), True), ((0.85, 0.95), False)])
def test_a_mean_weight_of_responses_below_1_is_remarked_where_tokens_give_no_reason(
    drawn: Summary, token: tuple[float, float], is_remarked: bool
) -> None:
    pair = drawn.pairs[0]
    weights = {
        "is_ratio_mean_seq": replace(pair.metrics["is_ratio_mean_seq"], value=0.9, low=0.83, high=0.99),
        "is_ratio_mean_token": replace(
            pair.metrics["is_ratio_mean_token"], value=sum(token) / 2, low=token[0], high=token[1]
        ),
    }
    pairs = [pair.model_copy(update={"metrics": pair.metrics | weights})]
    remarks = compare_answer(drawn.model_copy(update={"pairs": pairs, "contrasts": []})).remarks
    assert (
        any("the mean weight of a whole response is 0.90 [0.83, 0.99]" in remark for remark in remarks) == is_remarked
    )


def test_the_side_that_is_the_reference_is_named_and_no_error_of_0() -> None:
    summary = samples.undrawn(samples.summary(((Dtype.FP32, Dtype.FP32),)))
    pair = summary.pairs[0]
    assert pair.blame is not None
    assert pair.blame.rms_error_pi is not None
    none = replace(pair.blame.rms_error_pi, value=0.0, low=0.0, high=0.0)
    pair = pair.model_copy(update={"blame": replace(pair.blame, rms_error_pi=none)})
    answer = compare_answer(summary.model_copy(update={"pairs": [pair]}))
    assert answer.table is not None
    assert "ref." in str(answer.table.rows[0][-1])
    assert "ref.: that side is the reference itself" in answer.footnote
    assert "ref." not in compare_answer(samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),)))).footnote


def test_another_chat_template_is_told_where_the_checkpoint_changes_no_number(summary: Summary) -> None:
    contrast = SettingsContrast(
        counterpart=(summary.pairs[0].train, summary.pairs[0].infer),
        side="mu",
        settings=["checkpoint = other"],
        ratios={"kl_k3": Estimate(1.0, 0.5, 2.0, 0.95, 24, 1000, "token", 24)},
        format=None,
        is_rounding=True,
    )
    finding = SettingFinding(
        level="warning", side=None, setting="chat_template", what="the templates differ", advice=""
    )
    prompts = "4 of 4 prompts do not begin with <bos>, which these numbers do not show"
    evidence = [f"{finding.what}, which these numbers do not show", prompts, "KL"]
    verdict = Verdict(kind="precision", code=Code.SETTINGS, sentence="Settings: …", evidence=evidence)
    pair = summary.pairs[1].model_copy(update={"infer": "other", "verdict": verdict, "settings_contrast": contrast})
    changed = {"pairs": [summary.pairs[0], pair], "preflight": [finding]}
    [sentence] = settings_sentences(summary.model_copy(update=changed))
    assert sentence.endswith(f"times the same pair without it; {evidence[0]}")
