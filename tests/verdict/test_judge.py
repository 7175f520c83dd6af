"""The verdict as a whole: void data first, then a bug with its cause, then precision, then clean."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import Counts, SettingFinding, Verdict
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.subsamples import routing_check
from mismatch_probe.verdict.case import Case, IdsCheck
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.signatures.profile import Disagreement
from tests.report import samples
from tests.verdict.simulated import clean, disagreement, noisy, pair_of, with_logits, world


def counts(deviations: Disagreement | None, **more: int) -> Counts:
    zero = dict.fromkeys(Counts.model_fields, 0)
    if deviations is not None:
        sequences = deviations.pair.sequences
        zero |= {"num_sequences": sequences.num_sequences, "num_tokens": sequences.num_tokens}
    return Counts(**(zero | more))


def case(deviations: Disagreement | None, exact: Disagreement | None = None, **changes: Any) -> Case:
    dtype: Dtype = Dtype.BF16 if deviations is None else deviations.train_dtype
    given = Case(
        name=(dtype, dtype),
        train_dtype=dtype,
        infer_dtype=dtype,
        applied_train=dtype,
        applied_infer=dtype,
        counts=counts(deviations),
        metrics={} if deviations is None else pair_metrics(deviations.pair)[0],
        length=None,
        blame=None,
        disagreement=deviations,
        exact=exact,
        exact_name=None if exact is None else ("fp32", "fp32"),
    )
    return replace(given, **changes)


def with_exact(dtype: Dtype, *, seed: int = 0) -> Case:
    given = world(seed=seed)
    exact = clean(given)
    deviations = exact if dtype == "fp32" else replace(clean(given, dtype), formats_alone=True)
    return case(deviations, exact)


def test_a_length_budget_and_its_wide_interval_are_read_once() -> None:
    """`at most 90 [3, 2,400]` takes two readings."""
    pair = samples.summary(((Dtype.BF16, Dtype.BF16),)).pairs[0]
    assert pair.length is not None
    wide = Estimate(90.0, 3.0, 2400.0, 0.95, 24, 1000, "token")
    law = replace(pair.length, budget_tokens=wide, budget_tail_is_open=True, median_response=43.0, measured_up_to=64)
    law = replace(law, longest_budget_is_extrapolated=True)
    evidence = judge(replace(with_exact(Dtype.BF16), length=law)).evidence
    assert (
        "length budget at ESS 0.5: 90 tokens (95 % interval: 3 to 2,400), extrapolated beyond the 64 measured; tokens "
        "too rare for this sample may make it shorter; median response 43"
    ) in evidence


@pytest.mark.parametrize(("high", "verb"), [(2400.0, "may be"), (92.0, "are")])
def test_responses_are_longer_than_the_budget_only_where_its_interval_says_so(high: float, verb: str) -> None:
    pair = samples.summary(((Dtype.BF16, Dtype.BF16),)).pairs[0]
    assert pair.length is not None
    budget = Estimate(90.0, 3.0, high, 0.95, 24, 1000, "token")
    law = replace(pair.length, budget_tokens=budget, median_response=96.0, measured_up_to=96)
    advice = judge(replace(with_exact(Dtype.BF16), length=law)).advice
    assert any(line.startswith(f"Responses {verb} longer than the length budget: ") for line in advice)


def hot(dtype: Dtype) -> Disagreement:
    """The training path at another temperature."""
    given = world()
    return with_logits(given, dtype, pi=given.logits / 0.8)


def setting(**changes: Any) -> SettingFinding:
    given = {
        "level": "error",
        "setting": "sliding_window",
        "what": "it is 16 here and None there",
        "advice": "Fix it.",
    }
    return SettingFinding(**(given | changes))


def kind_and_code(verdict: Verdict) -> tuple[str, str]:
    return verdict.kind, verdict.code


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("dtype", "expected"), [(Dtype.FP32, "clean"), (Dtype.FP16, "precision"), (Dtype.BF16, "precision")]
)
def test_a_clean_run_is_never_accused(dtype: Dtype, expected: str, seed: int) -> None:
    assert kind_and_code(judge(with_exact(dtype, seed=seed))) == (expected, expected)


@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.BF16])
def test_without_an_fp32_pair_a_clean_run_is_undecided(dtype: Dtype) -> None:
    verdict = judge(case(clean(world(), dtype)))
    assert kind_and_code(verdict) == ("undecided", "unexplained")
    assert any("--dtype fp32" in advice for advice in verdict.advice)


def test_a_bug_in_the_fp32_pair_is_the_16_bit_pairs_bug_too() -> None:
    assert kind_and_code(judge(case(hot(Dtype.BF16), hot(Dtype.FP32)))) == ("bug", "temperature")


def test_a_bug_without_a_known_shape_is_unexplained() -> None:
    given = world()
    odd = with_logits(given, pi=given.logits + given.generator.normal(size=given.logits.shape) * 0.05)
    verdict = judge(case(odd, odd))
    assert kind_and_code(verdict) == ("bug", "unexplained")
    assert verdict.sentence.startswith("This is a bug, not precision")


def test_one_wild_token_in_fp32_is_a_bug_of_a_dense_model_and_routing_in_a_mixture() -> None:
    deviations = clean(world())
    log_pi = deviations.pair.log_pi.copy()
    log_pi[7] -= 1
    wild = replace(deviations, pair=replace(deviations.pair, log_pi=log_pi), is_settled=True)
    assert judge(case(wild, wild)).kind == "bug"
    calm = replace(wild, has_experts=True, is_settled=False)
    assert judge(case(calm, calm)).kind == "clean"


def test_settings_known_to_differ_name_a_bug_that_the_data_cannot() -> None:
    given = world()
    odd = with_logits(given, pi=given.logits + given.generator.normal(size=given.logits.shape) * 0.05)
    verdict = judge(case(odd, odd, preflight=[setting(code="positions")]))
    assert kind_and_code(verdict) == ("bug", "positions")
    assert "it is 16 here and None there" in verdict.sentence


def test_settings_support_what_the_data_shows() -> None:
    known = setting(setting="temperature", what="1 here and 0.8 there", code="temperature")
    verdict = judge(case(hot(Dtype.FP32), hot(Dtype.FP32), preflight=[known]))
    assert verdict.code == "temperature"
    assert "1 here and 0.8 there" in verdict.evidence
    assert verdict.sentence.startswith("1 here and 0.8 there. The two sides use different temperatures: ")
    assert verdict.also == []


def test_what_the_data_shows_alone_is_named_by_no_setting() -> None:
    hot_alone = case(hot(Dtype.FP32), hot(Dtype.FP32))
    assert judge(hot_alone).sentence.startswith("The two sides use different temperatures: ")
    cold = setting(setting="temperature", what="1 here and 0.8 there", code="temperature", level="note")
    assert judge(replace(hot_alone, preflight=[cold])).sentence == judge(hot_alone).sentence


def test_without_an_fp32_pair_settings_that_differ_are_a_bug() -> None:
    assert kind_and_code(judge(case(clean(world(), Dtype.BF16), preflight=[setting(code="positions")]))) == (
        "bug",
        "positions",
    )


def test_a_second_setting_that_differs_is_listed_beside_the_first() -> None:
    verdict = judge(case(hot(Dtype.FP32), hot(Dtype.FP32), preflight=[setting(code="positions")]))
    assert [verdict.code, *(cause.code for cause in verdict.also)] == ["temperature", "positions"]


def test_a_place_that_few_tokens_show_stands_behind_a_setting_that_differs() -> None:
    given = world()
    beyond = given.sequences.positions > np.median(given.sequences.positions)
    odd = with_logits(given, pi=given.logits + beyond[:, None] * given.generator.normal(size=given.logits.shape))
    odd = replace(odd, is_settled=True)
    assert judge(case(odd, odd)).code == "onset"
    verdict = judge(case(odd, odd, preflight=[setting(code="truncated_support")]))
    assert [verdict.code, *(cause.code for cause in verdict.also)] == ["truncated_support", "onset"]


def test_settings_that_differ_without_effect_accuse_nobody() -> None:
    sound = with_exact(Dtype.BF16)
    assert judge(replace(sound, preflight=[setting(code="positions")])).kind == "precision"


def test_a_setting_that_costs_precision_is_named_where_that_side_errs_more() -> None:
    given = world()
    twice = given.logits + 2 * (noisy(given, Dtype.BF16) - given.logits)
    rounded = setting(level="warning", side="pi", setting="rope_inv_freq_dtype", code="positions")
    exact = clean(given)
    for pi, expected in ((twice, "bug"), (noisy(given, Dtype.BF16), "precision")):
        pair = pair_of(given, pi, noisy(given, Dtype.BF16))
        deviations = disagreement(given, pair, Dtype.BF16, is_settled=False, formats_alone=True)
        assert judge(case(deviations, exact, preflight=[rounded])).kind == expected


@pytest.mark.slow
def test_a_setting_that_rounds_is_named_in_fp32_where_its_side_errs() -> None:
    given = world()
    disturbed = given.logits + 0.02 * given.generator.normal(size=given.logits.shape)
    cache = setting(level="warning", side="mu", what="keys and values in fp8", code="one_sided_dtype")
    of_mu, of_pi = (replace(with_logits(given, **{side: disturbed}), is_settled=True) for side in ("mu", "pi"))
    assert judge(case(of_mu, of_mu)).code == "unexplained"
    named = judge(case(of_mu, of_mu, preflight=[cache]))
    assert kind_and_code(named) == ("bug", "one_sided_dtype")
    assert named.also == []
    assert "keys and values in fp8" in named.sentence
    assert judge(case(of_pi, of_pi, preflight=[cache])).code == "unexplained"
    other = setting(setting="checkpoint", what="the engine holds another checkpoint", code="stale_weights")
    both = judge(case(of_mu, of_mu, preflight=[other, cache]))
    assert both.code == "stale_weights", "a checkpoint that is known to differ was left out beside a rounding"
    assert [cause.code for cause in both.also] == ["one_sided_dtype"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"applied_train": "fp32"}, Code.DTYPE_NOT_APPLIED),
        ({"applied_infer": None}, Code.DTYPE_NOT_APPLIED),
        ({"counts": counts(None, num_tokens=1, mismatched_ids=3)}, Code.IDS_DIFFER),
        ({"counts": counts(None, num_tokens=1, missing_mu=1)}, Code.MISSING_LOGPROBS),
        ({"counts": counts(None, num_tokens=1, nonfinite_pi=1)}, Code.NONFINITE),
        ({"counts": counts(None, num_tokens=1, positive_mu=2)}, Code.POSITIVE_LOGPROBS),
        ({"counts": counts(None, num_tokens=1, void_checks=1)}, Code.VOID_CHECKS),
        ({"ids": IdsCheck("train-bf16", 9, 3, 3, 0, 0, 0)}, Code.MISPAIRED),
    ],
)
def test_void_data_is_broken_whatever_the_numbers_say(changes: dict[str, Any], code: Code) -> None:
    verdict = judge(replace(with_exact(Dtype.BF16), **changes))
    assert kind_and_code(verdict) == ("broken", code)


def test_nothing_to_compare_is_broken() -> None:
    assert kind_and_code(judge(case(None))) == ("broken", "no_data")


def test_several_reasons_are_all_told() -> None:
    verdict = judge(case(None, counts=counts(None, missing_pi=4, nonfinite_mu=2)))
    assert [verdict.code, *(cause.code for cause in verdict.also)] == ["missing_logprobs", "nonfinite", "no_data"]


def test_broken_data_still_tells_the_bug_beside_it() -> None:
    verdict = judge(case(hot(Dtype.FP32), hot(Dtype.FP32), counts=counts(hot(Dtype.FP32), missing_pi=1)))
    assert verdict.kind == "broken"
    assert [cause.code for cause in verdict.also] == ["temperature"]


def test_a_part_of_one_side_in_another_format_is_evidence_of_the_precision_it_makes() -> None:
    apart = setting(level="warning", side="pi", what="the experts compute in fp32", code="one_sided_dtype")
    verdict = judge(replace(with_exact(Dtype.BF16), preflight=[apart]))
    assert verdict.kind == "precision"
    assert "the experts compute in fp32" in verdict.evidence


def test_flips_of_routing_are_precision_by_that_name() -> None:
    given = world()
    flips = (given.generator.random(given.sequences.num_tokens) < 0.005)[:, None]
    flipped = with_logits(given, Dtype.BF16, pi=given.logits + flips * given.generator.normal(size=given.logits.shape))
    deviations = replace(flipped, has_experts=True, is_settled=False, formats_alone=True)
    verdict = judge(case(deviations, clean(given)))
    assert kind_and_code(verdict) == ("precision", "routing")
    assert [cause.code for cause in verdict.also] == ["precision"]


def stale() -> Disagreement:
    """A pair in FP32 that disagrees everywhere, as other weights make it."""
    response, start = (
        with_logits(given, pi=given.logits + 0.05 * given.generator.normal(size=given.logits.shape))
        for given in (world(prompt=10), world(num_tokens=60, seed=1))
    )
    start = replace(start, pair=replace(start.pair, entropy_pi=None))
    return replace(response, prompt_start=start, is_settled=True, has_experts=True)


def with_choices(deviations: Disagreement, *shares: float) -> Disagreement:
    """With other experts for so many of the tokens of layers 2, 3, ..."""
    random = np.random.default_rng(0)
    others = np.stack([random.random(deviations.pair.sequences.num_tokens) < share for share in shares])
    check = routing_check(
        deviations.pair.sequences, range(2, 2 + len(shares)), others, 0.3 * others, deviations.pair.diff
    )
    return replace(deviations, routing=check)


@pytest.mark.slow
def test_experts_that_differ_in_fp32_from_a_layer_on_rule_out_other_weights_everywhere() -> None:
    deviations = with_choices(stale(), 0.0, 0.2)
    assert judge(case(stale(), stale())).code == "stale_weights"
    verdict = judge(case(deviations, deviations))
    assert kind_and_code(verdict) == ("bug", "other_experts")
    assert "from layer 3 on" in verdict.sentence
    assert "from 2 on, choose and weigh alike" in verdict.evidence[0]
    assert verdict.also == []


def test_experts_that_differ_in_the_first_layer_leave_other_weights_possible() -> None:
    deviations = with_choices(stale(), 0.2, 0.2)
    verdict = judge(case(deviations, deviations))
    assert kind_and_code(verdict) == ("bug", "other_experts")
    assert [cause.code for cause in verdict.also] == ["stale_weights"]


def test_near_ties_in_fp32_name_no_experts() -> None:
    deviations = with_choices(stale(), 0.0, 5e-4)
    assert judge(case(deviations, deviations)).code == "stale_weights"


def test_where_fp32_agrees_experts_are_no_bug() -> None:
    deviations = with_choices(replace(clean(world()), has_experts=True), 0.2)
    assert judge(case(deviations, deviations)).kind == "clean"


def test_deviations_far_beyond_any_format_do_not_stop_the_verdict() -> None:
    deviations = clean(world(), Dtype.BF16)
    log_pi = np.full_like(deviations.pair.log_pi, -80.0)
    wild = replace(deviations, pair=replace(deviations.pair, log_pi=log_pi), is_settled=True)
    assert judge(case(wild)).kind in ("bug", "undecided")


def commands(verdict: Verdict) -> list[str]:
    return [command[1] for advice in verdict.advice if (command := re.search("`mismatch-probe (.*)`$", advice))]


def test_precision_of_bf16_is_followed_up_and_so_is_a_switch_to_fp16() -> None:
    assert commands(judge(with_exact(Dtype.BF16))) == ["localize --run RUN --dtype bf16", "headroom --run RUN"]
    without_fp16 = replace(with_exact(Dtype.BF16), left_out=frozenset({Dtype.FP16.value}))
    assert commands(judge(without_fp16)) == ["localize --run RUN --dtype bf16"]


def test_fp16_that_the_engine_would_refuse_is_not_advised_and_the_reason_is_said() -> None:
    verdict = judge(replace(with_exact(Dtype.BF16), fp16_refused="vLLM refuses it"))
    assert commands(verdict) == ["localize --run RUN --dtype bf16"]
    assert verdict.advice[-1] == "FP16 is not open to this checkpoint here: vLLM refuses it"


@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.FP32])
def test_what_is_close_enough_needs_no_closer_look(dtype: Dtype) -> None:
    assert commands(judge(with_exact(dtype))) == []


def test_a_bug_without_a_name_is_looked_for_in_fp32() -> None:
    given = world()
    errors = given.generator.normal(size=given.logits.shape) * (given.generator.random((len(given.logits), 1)) < 0.1)
    verdict = judge(case(clean(given, Dtype.BF16), with_logits(given, Dtype.FP32, pi=given.logits + errors)))
    assert (verdict.kind, verdict.code) == ("bug", Code.UNEXPLAINED)
    assert commands(verdict) == ["localize --run RUN --dtype fp32 --modules"]


def test_a_bug_outside_the_model_sends_nobody_into_it() -> None:
    verdict = judge(case(hot(Dtype.BF16), replace(hot(Dtype.FP32), is_settled=True)))
    assert (verdict.kind, verdict.code) == ("bug", Code.TEMPERATURE)
    assert commands(verdict) == []


def test_two_formats_are_named_side_by_side() -> None:
    given = replace(with_exact(Dtype.BF16), name=("bf16", "fp16"), infer_dtype=Dtype.FP16, applied_infer=Dtype.FP16)
    assert commands(judge(given))[0] == "localize --run RUN --train-dtype bf16 --infer-dtype fp16"


def test_sides_with_settings_of_their_own_are_looked_into_by_their_names() -> None:
    given = replace(with_exact(Dtype.BF16), name=("bf16", "fp8kv"))
    assert commands(judge(given)) == ["localize --run RUN --pair bf16/fp8kv", "headroom --run RUN"]


def test_a_bug_in_sides_with_settings_is_looked_for_in_their_fp32_pair() -> None:
    given = world()
    errors = given.generator.normal(size=given.logits.shape) * (given.generator.random((len(given.logits), 1)) < 0.1)
    exact = with_logits(given, Dtype.FP32, pi=given.logits + errors)
    names = {"name": ("bf16", "eager"), "exact_name": ("fp32", "eager-fp32")}
    verdict = judge(case(clean(given, Dtype.BF16), exact, **names))
    assert commands(verdict) == ["localize --run RUN --pair fp32/eager-fp32 --modules"]


def test_weights_that_localize_does_not_load_are_not_sent_to_it() -> None:
    given = replace(with_exact(Dtype.BF16), name=("bf16", "stale"), can_be_looked_into=False)
    assert commands(judge(given)) == []


def test_without_an_fp32_pair_that_is_asked_for_first() -> None:
    assert commands(judge(case(clean(world(), Dtype.BF16)))) == ["compare --out RUN --resume --dtype fp32"]


def test_a_run_that_takes_no_dtypes_is_not_told_to() -> None:
    verdict = judge(replace(case(clean(world(), Dtype.BF16)), takes_dtypes=False))
    assert verdict.kind == "undecided"
    assert commands(verdict) == []
    assert "rescore" in " ".join(verdict.advice)
