import numpy as np
import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.gate.config import GateFile, parse_gate
from mismatch_probe.gate.decide import GateDecision, decide
from mismatch_probe.gate.measure import Evidence, Measurer
from mismatch_probe.report.answers.gate import checks_table
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.sequences import Sequences, TokenPair

BF16 = ("bf16", "bf16")


def gate(*checks: dict[str, object], **settings: object) -> GateFile:
    return parse_gate({"gate": {**settings, "check": list(checks)}}, "gate.toml")


def sample(num_sequences: int, *, seed: int = 0, scale: float = 0.01, length: int = 40) -> TokenPair:
    random = np.random.default_rng(seed)
    sequences = Sequences.of_lengths(random.integers(length // 2, 2 * length, num_sequences))
    scales = sequences.spread(scale * random.lognormal(0, 0.3, num_sequences))
    log_mu = -0.2 - random.exponential(0.5, sequences.num_tokens)
    return TokenPair(sequences, log_pi=log_mu + scales * random.standard_t(6, sequences.num_tokens), log_mu=log_mu)


def decided(file: GateFile, pair: TokenPair, baseline: TokenPair | None = None) -> GateDecision:
    evidence = Evidence(pair, pair.sequences.num_sequences, baseline, None if baseline is None else "paired")
    return decide(file, Measurer({BF16: evidence}))


def test_three_answers_by_where_the_limit_lies() -> None:
    pair = sample(256)
    value = pair_metrics(pair)[0]["abs_logprob_diff"].value
    answers = {
        times: decided(gate({"metric": "abs_logprob_diff", "max": times * value}), pair).answer
        for times in (0.8, 1.0, 1.25)
    }
    assert answers == {0.8: "fail", 1.0: "inconclusive", 1.25: "pass"}


def test_a_minimum_is_held_from_below() -> None:
    pair = sample(256)
    value = pair_metrics(pair)[0]["prob_pearson"].value
    assert decided(gate({"metric": "prob_pearson", "min": 1 - 3 * (1 - value)}), pair).answer == "pass"
    assert decided(gate({"metric": "prob_pearson", "min": 1 - (1 - value) / 3}), pair).answer == "fail"


@pytest.mark.parametrize("check", [{"metric": "abs_logprob_diff"}, {"metric": "abs_logprob_diff", "agg": "p99"}])
def test_the_smallest_limit_that_would_pass_passes_and_one_below_does_not(check: dict[str, object]) -> None:
    pair = sample(256)
    limit = decided(gate({**check, "max": 1.0}), pair).checks[0].passing_limit
    assert limit is not None
    assert decided(gate({**check, "max": limit}), pair).answer == "pass"
    assert decided(gate({**check, "max": 0.999 * limit}), pair).answer != "pass"


def test_too_few_sequences_decide_nothing_however_clear_they_are() -> None:
    assert decided(gate({"metric": "abs_logprob_diff", "max": 1e-6}), sample(60)).answer == "inconclusive"
    assert decided(gate({"metric": "abs_logprob_diff", "max": 100.0}), sample(60)).answer == "inconclusive"


@pytest.mark.parametrize(
    ("on_inconclusive", "code"),
    [
        ("extend", ExitCode.INCONCLUSIVE),
        ("warn", ExitCode.PASS),
        ("pass", ExitCode.PASS),
        ("fail", ExitCode.GATE_FAILED),
    ],
)
def test_what_an_inconclusive_answer_ends_with_is_the_files_choice(on_inconclusive: str, code: ExitCode) -> None:
    pair = sample(256)
    value = pair_metrics(pair)[0]["abs_logprob_diff"].value
    file = gate({"metric": "abs_logprob_diff", "max": value}, on_inconclusive=on_inconclusive)
    assert decided(file, pair).exit_code(file.settings) == code


@pytest.mark.parametrize(
    ("on_inconclusive", "code"), [("warn", ExitCode.INCONCLUSIVE), ("pass", ExitCode.INCONCLUSIVE), ("fail", 1)]
)
def test_a_sample_too_small_for_the_first_look_is_never_a_pass(on_inconclusive: str, code: ExitCode) -> None:
    file = gate({"metric": "abs_logprob_diff", "max": 100.0}, on_inconclusive=on_inconclusive)
    assert decided(file, sample(60)).exit_code(file.settings) == code


def test_a_warning_never_decides() -> None:
    checks = ({"metric": "abs_logprob_diff", "max": 1e-6, "level": "warn"}, {"metric": "kl_k2", "max": 1.0})
    decision = decided(gate(*checks), sample(256))
    assert [check.answer for check in decision.checks] == ["fail", "pass"]
    assert decision.answer == "pass"


def test_one_broken_limit_among_kept_ones_fails_the_gate() -> None:
    checks = ({"metric": "abs_logprob_diff", "max": 1e-6}, {"metric": "kl_k2", "max": 1.0})
    assert decided(gate(*checks), sample(256)).answer == "fail"


def test_holm_asks_more_of_each_check_the_more_checks_there_are() -> None:
    pair = sample(256)
    bounds = decided(gate({"metric": "abs_logprob_diff", "max": 1.0}), pair).checks[0]
    assert bounds.low is not None
    limit = 0.999 * bounds.low
    alone = {"metric": "abs_logprob_diff", "max": limit}
    others = [{"metric": "prob_abs_diff", "max": 0.5 + number / 100} for number in range(40)]
    assert decided(gate(alone), pair).answer == "fail"
    assert decided(gate(alone, *others), pair).answer == "inconclusive"


@pytest.mark.parametrize(("size", "has_bounds"), [(256, True), (60, False)])
def test_the_table_says_of_what_its_bounds_are_where_it_has_any(size: int, has_bounds: bool) -> None:
    table = checks_table(decided(gate({"metric": "abs_logprob_diff", "max": 1.0}), sample(size)).checks)
    assert ("bounds: the chance that any is wrong" in table.reading) is has_bounds


def test_exact_checks_fail_on_one_token() -> None:
    pair = sample(256)
    same = TokenPair(pair.sequences, log_pi=pair.log_mu, log_mu=pair.log_mu)
    file = gate(preset="bitwise")
    assert decided(file, same).answer == "pass"
    off = np.array(pair.log_mu)
    off[17] += 1e-12
    assert decided(file, TokenPair(pair.sequences, log_pi=off, log_mu=pair.log_mu)).answer == "fail"


def test_a_slice_looks_at_nothing_else() -> None:
    pair = sample(256)
    worse_late = np.where(pair.sequences.positions >= 16, pair.log_mu - 0.5, pair.log_mu)
    late = TokenPair(pair.sequences, log_pi=worse_late, log_mu=pair.log_mu)
    check = {"metric": "abs_logprob_diff", "max": 0.1}
    assert decided(gate({**check, "slice": {"position": "0:16"}}), late).answer == "pass"
    assert decided(gate({**check, "slice": {"position": "16:"}}), late).answer == "fail"


def test_a_clip_bounds_what_one_token_can_do() -> None:
    pair = sample(256)
    spiked = np.array(pair.log_mu)
    spiked[5] += -300.0
    outlier = TokenPair(pair.sequences, log_pi=pair.log_mu, log_mu=spiked)
    clipped = decided(gate({"metric": "kl_k3", "clip": 5, "max": 0.1}), outlier).checks[0]
    unclipped = decided(gate({"metric": "kl_k3", "max": 0.1, "level": "warn"}), outlier).checks[0]
    assert clipped.value < 0.1 < 1e100 < unclipped.value


def test_the_same_tokens_are_compared_in_pairs_and_that_sees_more() -> None:
    old = sample(256)
    better, worse = (TokenPair(old.sequences, old.log_mu + times * old.diff, old.log_mu) for times in (0.98, 1.04))
    file = gate({"metric": "abs_logprob_diff", "max_regression": 0.02})
    assert decided(file, better, old).answer == "pass"
    assert decided(file, worse, old).answer == "fail"
    other = sample(256, seed=1, scale=0.0104)
    apart = TokenPair(Sequences(other.sequences.offsets, other.sequences.clusters + 1000), other.log_pi, other.log_mu)
    assert decided(file, apart, old).answer == "inconclusive"


def test_a_falling_ess_is_a_regression() -> None:
    old = sample(256)
    worse = TokenPair(old.sequences, old.log_mu + 4 * old.diff, old.log_mu)
    file = gate({"metric": "ess_seq", "max_regression": 0.02, "level": "warn"})
    assert decided(file, worse, old).checks[0].answer == "fail"
    assert decided(file, old, worse).checks[0].answer == "pass"


def test_a_long_enough_sample_is_judged_with_the_whole_budget_at_the_last_look() -> None:
    file = gate({"metric": "abs_logprob_diff", "max": 1.0}, min_sequences=64, max_sequences=256)
    looks = [decided(file, sample(size)).look for size in (64, 128, 256, 300)]
    assert [look.number for look in looks] == [1, 2, 3, 3]
    assert looks[-1].spent == pytest.approx(0.05)
    assert [look.next_sequences for look in looks] == [128, 256, None, None]


def of_prompts(pair: TokenPair, num_prompts: int) -> TokenPair:
    """The same responses as answers to so many prompts."""
    clusters = np.arange(pair.sequences.num_sequences) % num_prompts
    return TokenPair(Sequences(pair.sequences.offsets, clusters), pair.log_pi, pair.log_mu)


EASY = {"metric": "abs_logprob_diff", "max": 100.0}


@pytest.mark.parametrize("check", [EASY, {"metric": "bitwise_equal", "equal": 0.0}])
def test_many_responses_to_few_prompts_are_no_pass(check: dict[str, object]) -> None:
    pair = sample(256)
    few, enough = decided(gate(check), of_prompts(pair, 63)), decided(gate(check), of_prompts(pair, 64))
    assert (few.answer, enough.answer) == ("inconclusive", "pass")
    assert "63 prompts are fewer than the 64 that a pass needs" in few.checks[0].sentence
    assert (few.look.num_sequences, few.look.num_prompts, few.look.min_prompts) == (256, 63, 64)
    assert few.checks[0].num_prompts == 63
    assert few.checks[0].passing_limit is None


@pytest.mark.parametrize(("on_inconclusive", "code"), [("extend", 3), ("warn", 3), ("pass", 3), ("fail", 1)])
def test_no_setting_passes_too_few_prompts(on_inconclusive: str, code: int) -> None:
    file = gate(EASY, on_inconclusive=on_inconclusive)
    assert decided(file, of_prompts(sample(256), 8)).exit_code(file.settings) == code


def test_few_prompts_can_fail_and_how_many_are_enough_is_the_files_choice() -> None:
    few = of_prompts(sample(256), 8)
    assert decided(gate({"metric": "abs_logprob_diff", "max": 1e-6}), few).answer == "fail"
    assert decided(gate(EASY, min_prompts=8), few).answer == "pass"


def test_the_prompts_of_a_slice_are_those_that_reach_it() -> None:
    pair = sample(256, length=20)
    long = int((pair.sequences.lengths > 38).sum())
    assert 0 < long < 64
    decision = decided(gate({**EASY, "slice": {"position": "38:"}}), pair)
    assert (decision.answer, decision.checks[0].num_prompts) == ("inconclusive", long)


@pytest.mark.parametrize("num_prompts", [1, 2, 3])
def test_a_gate_on_hardly_any_prompt_does_not_break(num_prompts: int) -> None:
    for limit in (1e-6, 100.0):
        decision = decided(gate({"metric": "abs_logprob_diff", "max": limit}), of_prompts(sample(256), num_prompts))
        assert decision.answer in ("inconclusive", "fail") if num_prompts > 1 else decision.answer == "inconclusive"
