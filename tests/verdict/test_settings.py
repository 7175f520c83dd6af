"""A side's setting is the answer where it is measured: what it costs, and whether rounding makes as much."""

from typing import Any

import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import Cause, PairSummary, SettingsContrast, Verdict
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.headline import headline
from mismatch_probe.verdict.settings import format_of, settings_words, with_settings_contrast
from tests.report import samples

FP8 = "kv_cache_dtype = fp8"
OPEN = Verdict(kind="undecided", code="unexplained", sentence="Open.", advice=["Add FP32: `compare --dtype fp32`"])
SOUND = Verdict(kind="precision", code="precision", sentence="Precision.")
BUG = Verdict(kind="bug", code="positions", sentence="The two sides treat positions differently.")
OWN = "Run FP32 with the setting: `compare --train fp32 --infer x-fp32`"


def estimate(value: float, low: float | None = None, high: float | None = None) -> Estimate:
    low, high = (value * 0.8 if low is None else low), (value * 1.25 if high is None else high)
    return Estimate(value, low, high, 0.95, 24, 1000, "token", 24)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (49.0, 81.0, "; FP16 is 63 [49, 81] times closer."),
        (3.0, 1e7, "; FP16 is 63 times closer (too few to bound)."),
        (63.0, 63.0, "; FP16 is 63 times closer (no spread)."),
    ],
)
def test_words_that_stand_for_an_interval_close_the_sentence(low: float, high: float, words: str) -> None:
    summary = samples.undrawn(samples.summary())
    contrasts = [each.model_copy(update={"ratio": estimate(63.0, low, high)}) for each in summary.contrasts]
    assert words in headline(summary.pairs, contrasts)


def beside(verdict: Verdict = OPEN) -> PairSummary:
    """BF16 on both sides."""
    pair = samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),))).pairs[0]
    metrics = {"kl_k3": estimate(0.0022), "abs_logprob_diff": estimate(0.05), "abs_logprob_diff_max": estimate(0.4)}
    return pair.model_copy(update={"metrics": metrics, "verdict": verdict, "settings_contrast": None})


def judged(
    *settings: str, times: float, of_abs: float, of_largest: float, without: Verdict = OPEN, **changes: Any
) -> PairSummary:
    """A pair with `settings`, whose KL, abs(d) and largest abs(d) are so many times those of BF16."""
    base = beside(without)
    metrics = {
        "kl_k3": estimate(0.0022 * times),
        "abs_logprob_diff": estimate(0.05 * of_abs),
        "abs_logprob_diff_max": estimate(0.4 * of_largest),
    }
    given = {"infer": "x", "metrics": metrics, "verdict": OPEN.model_copy(update={"advice": [OWN]})}
    contrast = SettingsContrast(
        counterpart=("bf16", "bf16"),
        side="mu",
        settings=list(settings),
        ratios={"kl_k3": estimate(times), "abs_logprob_diff": estimate(of_abs)},
    )
    return with_settings_contrast(base.model_copy(update=given | changes), contrast, base)


def test_an_fp8_cache_is_the_answer_where_no_fp32_pair_was_run() -> None:
    pair = judged(FP8, times=21, of_abs=4.2, of_largest=6)
    assert (pair.verdict.kind, pair.verdict.code) == ("undecided", "settings")
    assert pair.verdict.sentence == (
        "Settings: the FP8 KV cache costs KL 0.046 a token, 21 [17, 26] times the same pair without it, as rounding to "
        "FP8 can; kv_cache_dtype = fp8 is all that differs from BF16."
    )
    assert pair.verdict.advice == OPEN.advice
    assert "FP8 rounds 16 times as coarsely as BF16" in pair.verdict.evidence[1]
    assert headline([beside(), pair], []) == (
        "The FP8 KV cache costs KL 0.046 a token, 21 [17, 26] times the same pair without it, as rounding to FP8 can; "
        "what BF16 itself costs is undecided: no FP32 pair was run to rule out a bug."
    )


def test_where_fp32_agrees_without_it_an_fp8_cache_is_precision() -> None:
    pair = judged(FP8, times=21, of_abs=4.2, of_largest=6, without=SOUND)
    assert (pair.verdict.kind, pair.verdict.advice) == ("precision", [])
    assert pair.verdict.sentence.endswith("kv_cache_dtype = fp8 is all that differs from BF16, where FP32 agrees.")
    assert headline([beside(SOUND), pair], []) == (
        "No bug. The FP8 KV cache costs KL 0.046 a token, 21 [17, 26] times the same pair without it, as rounding to "
        "FP8 can."
    )


@pytest.mark.parametrize(
    "change",
    [
        {"times": 9000, "of_abs": 90, "of_largest": 90},
        {"times": 400, "of_abs": 18, "of_largest": 18},
        {"times": 21, "of_abs": 4.2, "of_largest": 60},
    ],
    ids=["beyond the format's law", "more nats than any rounding", "one token far off"],
)
@pytest.mark.parametrize("without", [OPEN, SOUND])
def test_what_a_format_cannot_make_is_never_its_rounding(change: dict[str, float], without: Verdict) -> None:
    pair = judged(FP8, **change, without=without)
    assert (pair.verdict.kind, pair.verdict.code) == ("undecided", "settings")
    assert pair.verdict.advice == [OWN]
    assert "more than rounding to FP8 can" in headline([beside(without), pair], [])
    assert headline([pair], []).startswith("Undecided: ")


@pytest.mark.parametrize(("times", "kind"), [(1.2, "precision"), (2.5, "precision"), (9, "undecided")])
@pytest.mark.parametrize("setting", ["tensor_parallel_size = 2", "attention_backend = FLEX", "enforce_eager = False"])
def test_a_setting_without_a_format_only_adds_up_in_another_order(setting: str, times: float, kind: str) -> None:
    pair = judged(setting, times=times, of_abs=times**0.5, of_largest=1.5, without=SOUND)
    assert pair.verdict.kind == kind
    assert pair.settings_contrast is not None
    assert pair.settings_contrast.is_rounding == (True if kind == "precision" else None)
    assert "more than rounding" not in pair.verdict.sentence
    assert headline([pair], []).endswith("without it; FP32 was not run with it.") == (kind == "undecided")


def test_more_nats_than_any_rounding_makes_are_not_another_order_of_sums() -> None:
    pair = judged("tensor_parallel_size = 2", times=400, of_abs=20, of_largest=3, without=SOUND)
    assert "more than rounding can" in pair.verdict.sentence


def test_a_setting_whose_interval_holds_1_changes_nothing_measurable() -> None:
    pair = judged("prefix_caching = True", times=1.1, of_abs=1, of_largest=1, without=SOUND)
    assert pair.verdict.sentence.startswith(
        "Settings: prefix caching changes nothing measurable: KL 0.0024 a token, 1.1 [0.9, 1.4] times the same "
        "pair without it; "
    )


def test_a_bug_stays_one_whatever_its_settings_cost() -> None:
    assert judged(FP8, times=21, of_abs=4.2, of_largest=6, verdict=BUG).verdict == BUG
    assert judged(FP8, times=21, of_abs=4.2, of_largest=6, without=BUG).verdict.code == Code.UNEXPLAINED


ONE_SIDED = Verdict(kind="bug", code="one_sided_dtype", sentence="The two sides are set differently: the cache is fp8.")


def test_a_format_that_was_asked_for_is_no_bug_where_fp32_has_it_too() -> None:
    pair = judged(FP8, times=21, of_abs=4.2, of_largest=6, without=SOUND, verdict=ONE_SIDED)
    assert (pair.verdict.kind, pair.verdict.code) == ("precision", "settings")


@pytest.mark.parametrize(
    ("setting", "of_largest", "verdict"),
    [
        ("tensor_parallel_size = 2", 6, ONE_SIDED),
        (FP8, 60, ONE_SIDED),
        (FP8, 6, ONE_SIDED.model_copy(update={"also": [Cause(code="positions", sentence="They part.")]})),
    ],
    ids=["no format was asked for", "more than it can make", "another cause beside it"],
)
def test_a_format_that_explains_too_little_stays_a_bug(setting: str, of_largest: float, verdict: Verdict) -> None:
    pair = judged(setting, times=2, of_abs=1.4, of_largest=of_largest, without=SOUND, verdict=verdict)
    assert pair.verdict == verdict


def test_a_log_is_not_judged_by_settings() -> None:
    assert judged(FP8, times=21, of_abs=4.2, of_largest=6, is_logged=True).verdict.code == Code.UNEXPLAINED


def test_without_a_ratio_nothing_is_taken_for_rounding() -> None:
    base = beside(SOUND)
    contrast = SettingsContrast(counterpart=("bf16", "bf16"), side="mu", settings=[FP8], ratios={})
    pair = with_settings_contrast(base.model_copy(update={"infer": "x", "verdict": OPEN}), contrast, base)
    assert pair.verdict.kind == "undecided"
    assert pair.settings_contrast is not None
    assert pair.settings_contrast.is_rounding is None


@pytest.mark.parametrize(
    ("setting", "name", "words"),
    [
        ("kv_cache_dtype = fp8", "FP8", "the FP8 KV cache"),
        ("kv_cache_dtype = fp8_e5m2", "FP8 E5M2", "the FP8 E5M2 KV cache"),
        ("kv_cache_dtype = nvfp4", "FP4", "the FP4 KV cache"),
        ("kv_cache_dtype = bfloat16", "BF16", "the BF16 KV cache"),
        ("kv_cache_dtype = auto", None, "kv_cache_dtype = auto"),
        ("quantization = fp8_per_channel", "FP8", "quantisation to FP8"),
        ("quantization = experts_int8", "INT8", "quantisation to INT8"),
        ("quantization = None", None, "quantization = None"),
        ("tensor_parallel_size = 2", None, "tensor parallelism over 2"),
        ("enforce_eager = False", None, "compilation"),
        ("prefix_caching = True", None, "prefix caching"),
        ("seed = 7", None, "seed = 7"),
    ],
)
def test_settings_are_told_in_the_fields_words(setting: str, name: str | None, words: str) -> None:
    found = format_of([setting])
    assert (None if found is None else found.name) == name
    assert settings_words([setting]) == words


def test_of_several_settings_the_coarsest_format_counts() -> None:
    both = ["prefix_caching = True", "quantization = int8_per_channel_weight_only", FP8]
    found = format_of(both)
    assert found is not None
    assert (found.name, found.times_as_coarse(Dtype.BF16), found.times_as_coarse(Dtype.FP16)) == ("FP8", 16, 128)
    assert settings_words(both) == "prefix caching, quantisation to INT8 and the FP8 KV cache"


def test_other_verdicts_are_told_as_before() -> None:
    cause = Cause(code="other_checkpoint", sentence="The checkpoint is not the one that made this log.")
    verdict = Verdict(kind="undecided", **cause.model_dump())
    assert judged(FP8, times=2, of_abs=1.4, of_largest=1, without=verdict).verdict.code == Code.UNEXPLAINED


def test_a_summary_of_an_older_version_is_read_by_its_own_names() -> None:
    contrast = SettingsContrast(counterpart=("bf16", "bf16"), side="mu", settings=[FP8], ratios={})
    written = contrast.model_dump(mode="json")
    older = {"beside" if name == "counterpart" else name: value for name, value in written.items()}
    assert "counterpart" in written
    assert SettingsContrast.model_validate(older) == contrast
