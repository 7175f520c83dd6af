"""The rules, most serious first: broken data, then a bug, then precision, then clean."""

from collections.abc import Callable

from mismatch_probe.records.summary import Verdict
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.wording import nats, percent, scientific, tokens

FP32_AGREES_MEAN_ABS_NATS = 1e-4
"""FP32 against FP32 differs by accumulation order alone: 2e-6 nats measured across engines on small models. Fifty times
that leaves room for deep models; a bug that matters moves the mean far past it."""

FP32_AGREES_MAX_ABS_NATS = 0.05
"""One token this far off in FP32 is no rounding: rounding in FP32 reaches 1e-3 nats on the least likely tokens."""

DOMINANT_SIDE_SHARE = 0.8


def judge(case: Case) -> Verdict:
    """The verdict on one pair: the first rule that applies."""
    rules: tuple[Callable[[Case], Verdict | None], ...] = (_broken, _bug, _clean)
    for rule in rules:
        verdict = rule(case)
        if verdict is not None:
            return verdict
    return _precision(case)


def exact_pair_agrees(metrics: dict[str, Estimate]) -> bool:
    """Whether FP32 against FP32 agrees as two right implementations do."""
    return (
        metrics["abs_logprob_diff"].value <= FP32_AGREES_MEAN_ABS_NATS
        and metrics["abs_logprob_diff_max"].value <= FP32_AGREES_MAX_ABS_NATS
    )


def _broken(case: Case) -> Verdict | None:
    counts = case.counts
    for side, asked, applied in (
        ("the training path", case.train_dtype, case.applied_train),
        ("the engine", case.infer_dtype, case.applied_infer),
    ):
        if applied != asked:
            return Verdict(
                kind="broken",
                code="dtype_not_applied",
                sentence=f"Not a measurement of {asked}: {side} ran in {applied or 'an unknown dtype'}.",
                evidence=[f"asked for {asked}, read back {applied}"],
                advice=[
                    f"Find what overrides the dtype of {side} (a quantisation setting or the checkpoint's own config)."
                ],
            )
    problems = (
        ("ids_differ", counts.mismatched_ids, "responses were scored on other token ids than were sampled"),
        ("missing_logprobs", counts.missing_mu, "log-probs are missing (NaN) on the engine's side"),
        ("missing_logprobs", counts.missing_pi, "log-probs are missing (NaN) on the training side"),
        ("nonfinite", counts.nonfinite_mu, "log-probs are infinite on the engine's side"),
        ("nonfinite", counts.nonfinite_pi, "log-probs are infinite on the training side"),
    )
    for code, count, what in problems:
        if count:
            return Verdict(
                kind="broken",
                code=code,
                sentence=f"The data is broken: {count} {what}.",
                evidence=[f"{counts.num_sequences} responses with {counts.num_tokens} tokens were left to measure"],
                advice=["Numbers below describe the usable responses only; do not act on them before this is mended."],
            )
    if not counts.num_tokens:
        return Verdict(
            kind="broken",
            code="no_data",
            sentence="Nothing was measured: not one response has a token to compare.",
            advice=["Check that the model generates text for these prompts (--max-new-tokens, the chat template)."],
        )
    return None


def _bug(case: Case) -> Verdict | None:
    exact = case.metrics if case.is_exact_pair else case.exact_pair
    if exact is None or exact_pair_agrees(exact):
        return None
    mean, largest = exact["abs_logprob_diff"], exact["abs_logprob_diff_max"]
    return Verdict(
        kind="bug",
        code="unexplained",
        sentence="This is a bug, not precision: the two implementations disagree in FP32 too.",
        evidence=[
            f"FP32 against FP32: mean abs(d) {nats(mean)} nats; rounding stays below {FP32_AGREES_MEAN_ABS_NATS:g}",
            f"largest abs(d) in FP32: {scientific(largest.value)} nats",
        ],
        advice=[
            "Do not change dtypes yet. Look at where along the response and on which tokens the FP32 pair disagrees.",
            "Compare the effective settings of both sides: temperature, top-p, RoPE scaling, sliding window, template.",
        ],
    )


def _clean(case: Case) -> Verdict | None:
    if not exact_pair_agrees(case.metrics):
        return None
    return Verdict(
        kind="clean",
        code="clean",
        sentence=f"Clean: the two sides agree to {nats(case.metrics['abs_logprob_diff'])} nats a token.",
        evidence=[f"largest abs(d) {scientific(case.metrics['abs_logprob_diff_max'].value)} nats"],
    )


def _precision(case: Case) -> Verdict:
    kl = case.metrics["kl_k3"]
    evidence = [f"token KL (k3) {scientific(kl.value)} ({_range(kl)})"]
    kind = "precision"
    if case.exact_pair is None:
        kind = "undecided"
        sentence = (
            f"The sides differ by KL {scientific(kl.value)} a token; without an FP32 pair precision and bug look alike."
        )
        advice = ["Add --dtype fp32: FP32 against FP32 decides between precision and a bug."]
    else:
        sentence = f"Precision: the sides differ by KL {scientific(kl.value)} a token, and agree in FP32."
        evidence.append(f"FP32 against FP32: mean abs(d) {nats(case.exact_pair['abs_logprob_diff'])} nats")
        advice = []
    evidence += _length_evidence(case) + _side_evidence(case)
    return Verdict(
        kind="precision" if kind == "precision" else "undecided",
        code="precision" if kind == "precision" else "unexplained",
        sentence=sentence,
        evidence=evidence,
        advice=advice + _length_advice(case),
    )


def _length_evidence(case: Case) -> list[str]:
    if case.length is None or case.length.budget_tokens is None:
        return []
    budget = case.length.budget_tokens
    beyond = "extrapolated beyond" if case.length.longest_budget_is_extrapolated else "inside"
    return [
        f"length budget at ESS {case.length.budget_ess:g}: {tokens(budget.value)} tokens ({_range(budget)}), {beyond} "
        f"the {tokens(case.length.measured_up_to)} measured; median response {tokens(case.length.median_response)} tokens"
    ]


def _length_advice(case: Case) -> list[str]:
    if case.length is None or case.length.budget_tokens is None:
        return []
    if case.length.budget_tokens.value >= case.length.measured_up_to:
        return []
    return [
        "Responses are longer than the length budget: sequence-level importance weights lose more than half of their "
        "effective sample; use a closer dtype or token-level corrections."
    ]


def _side_evidence(case: Case) -> list[str]:
    if case.blame is None or case.blame.share_pi is None:
        return []
    share = case.blame.share_pi
    if share.value > DOMINANT_SIDE_SHARE:
        where = "mostly on the training side"
    elif share.value < 1 - DOMINANT_SIDE_SHARE:
        where = "mostly on the engine's side"
    else:
        where = "on both sides"
    return [f"the error against the reference is {where}: {percent(share.value)} of its square is the training path's"]


def _range(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "no interval"
    return f"{percent(estimate.level)} interval {scientific(estimate.low)} to {scientific(estimate.high)}"
