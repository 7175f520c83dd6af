"""From findings to a verdict: a code, a sentence, what shows it, and what to do."""

from mismatch_probe.headroom.fp16 import LARGEST
from mismatch_probe.headroom.trial import fits
from mismatch_probe.headroom.weights import LOSSY
from mismatch_probe.notation import write_count, write_number, write_share
from mismatch_probe.records.headroom import (
    ActivationFindings,
    GradientFindings,
    HeadroomCode,
    HeadroomVerdict,
    Trial,
    WeightFindings,
)

_INITIAL_SCALE = "loss_scale.initial"


def judge_weights(weights: WeightFindings) -> HeadroomVerdict:
    """What the stored weights alone say."""
    total = weights.total
    shown = [weights_sentence(weights)]
    if total.num_nonfinite:
        return HeadroomVerdict(
            code=HeadroomCode.DOES_NOT_FIT,
            sentence=f"{write_count(total.num_nonfinite)} stored weights are infinite or NaN, first in "
            f"{weights.worst[0].tensor}: the checkpoint is damaged in any format.",
            evidence=shown,
            advice=["download or write the checkpoint again"],
        )
    bad = [one.tensor for one in weights.worst if one.num_overflowed or one.relative_error > LOSSY]
    if bad:
        what = "overflow FP16" if total.num_overflowed else "are too small for FP16 to hold as well as BF16 does"
        return HeadroomVerdict(
            code=HeadroomCode.FITS_EXCEPT,
            sentence=f"The weights fit FP16 except {_listed(bad)}, which {what}; activations and gradients were not "
            "looked at.",
            evidence=shown,
            advice=["run headroom without --weights-only: it tries these modules in FP32"],
        )
    return HeadroomVerdict(
        code=HeadroomCode.FITS,
        sentence="The weights fit FP16; activations and gradients were not looked at.",
        evidence=shown,
        advice=["run headroom without --weights-only before training in FP16"],
    )


def judge(
    weights: WeightFindings,
    activations: ActivationFindings,
    gradients: GradientFindings,
    plain: Trial,
    bf16: Trial,
    advised: Trial | None,
) -> HeadroomVerdict:
    """What the runs say; every claim is of a run that was made."""
    shown = [
        weights_sentence(weights),
        _activations_sentence(activations),
        _logprobs_sentence(plain, bf16),
        *_gradients_sentences(gradients, plain, bf16),
    ]
    if fits(plain, bf16):
        if plain.from_exponent == 0:
            return HeadroomVerdict(
                code=HeadroomCode.FITS,
                sentence="The checkpoint fits FP16: weights, activations and gradients, even without a loss scale.",
                evidence=shown,
                advice=[_scale_advice(plain)],
            )
        return HeadroomVerdict(
            code=HeadroomCode.FITS_WITH_LOSS_SCALE,
            sentence=f"The checkpoint fits FP16 with a loss scale of {_scales(plain)}.",
            evidence=shown,
            advice=[_scale_advice(plain)],
        )
    shown += _advised_sentences(advised, bf16)
    if advised is not None and fits(advised, bf16):
        return HeadroomVerdict(
            code=HeadroomCode.FITS_EXCEPT,
            sentence=f"{_trouble(plain, activations, bf16)} With {_listed(advised.modules_in_fp32)} in FP32 and a loss "
            f"scale of {_scales(advised)} it fits.",
            evidence=shown,
            advice=[
                f"keep {_listed(advised.modules_in_fp32)} in FP32 (FSDP2: fully_shard the module with "
                "MixedPrecisionPolicy(param_dtype=torch.float32)), and in the engine, which overflows there as well",
                "or use BF16 on both sides",
                _scale_advice(advised),
            ],
        )
    return HeadroomVerdict(
        code=HeadroomCode.DOES_NOT_FIT,
        sentence=f"{_trouble(plain, activations, bf16)} The checkpoint does not fit FP16.",
        evidence=shown,
        advice=["train and sample in BF16 (--dtype bf16), or in FP32"],
    )


def weights_sentence(weights: WeightFindings) -> str:
    total = weights.total
    return (
        f"weights: {write_count(total.num_values)} in {write_count(weights.num_tensors)} tensors, the largest "
        f"{write_number(total.largest)} of {LARGEST:,.0f}; in FP16 {write_count(total.num_overflowed)} overflow, "
        f"{write_count(total.num_flushed)} become zero ({write_share(total.num_flushed, total.num_values)}), "
        f"{write_count(total.num_subnormal)} subnormal; relative rounding error {write_number(total.relative_error)}"
    )


def _activations_sentence(activations: ActivationFindings) -> str:
    tightest = activations.tightest[0]
    where = f"{tightest.module or 'the model'} ({tightest.operation})"
    over = f"{write_count(activations.num_tokens)} tokens of {write_count(activations.num_sequences)} sequences"
    if tightest.largest is None:
        return f"activations: not finite even in FP32, at {where}, over {over}"
    margin = tightest.margin_bits
    room = "" if margin is None else f", {abs(margin):.1f} bits {'below' if margin >= 0 else 'above'} the limit"
    first = activations.first_nonfinite
    end = "" if first is None else f"; the FP16 run is first not finite at {first}"
    return (
        f"activations: the largest held in FP16 is {write_number(tightest.largest)} at {where}{room}, over {over}{end}"
    )


def _logprobs_sentence(plain: Trial, bf16: Trial) -> str:
    return (
        f"log-probs: root mean square error against FP32 {_error(plain.logprob_error_nats)} nats in FP16, "
        f"{_error(bf16.logprob_error_nats)} in BF16"
    )


def _gradients_sentences(gradients: GradientFindings, plain: Trial, bf16: Trial) -> list[str]:
    unscaled = gradients.underflow[0]
    rewards = "stand-in rewards, because none differed" if gradients.stand_in_rewards else "rewards of the task"
    found = [
        f"gradients of {gradients.objective} over {gradients.num_responses} responses ({rewards}): unscaled, "
        f"{_percent(unscaled.activations_flushed)} of the activations' and {_percent(unscaled.parameters_flushed)} of "
        "the weights' would be zero in FP16; twice the responses need twice the scale",
    ]
    if plain.scales:
        found.append(
            f"FP16 backward: scales that fit {_scales(plain)}; smallest relative error {_error(plain.gradient_error)} "
            f"against FP32, {_error(bf16.gradient_error)} in BF16{_overflow(plain)}"
        )
    optimizer = gradients.optimizer
    found.append(
        f"optimizer: AdamW's moments stay in FP32; in FP16 {_percent(optimizer.first_moment_flushed)} of the first and "
        f"{_percent(optimizer.second_moment_flushed)} of the second would be zero"
    )
    return found


def _overflow(trial: Trial) -> str:
    bad = next((one for one in trial.scales if one.relative_error is None), None)
    return "" if bad is None else f"; not finite from 2^{bad.exponent} on, first in {bad.nonfinite[0]}"


def _advised_sentences(advised: Trial | None, bf16: Trial) -> list[str]:
    if advised is None:
        return []
    outcome = "fits" if fits(advised, bf16) else "does not fit"
    first = "" if advised.first_nonfinite is None else f"; first not finite at {advised.first_nonfinite}"
    return [
        f"tried with {_listed(advised.modules_in_fp32)} in FP32: {outcome}; log-probs "
        f"{_error(advised.logprob_error_nats)} nats from FP32, gradient {_error(advised.gradient_error)}, scales that "
        f"fit {_scales(advised)}{first}"
    ]


def _trouble(plain: Trial, activations: ActivationFindings, bf16: Trial) -> str:
    """What keeps the plain FP16 run from fitting."""
    if plain.first_nonfinite is not None:
        return f"Activations overflow FP16: the first is {plain.first_nonfinite}."
    if plain.logprob_error_nats is None:
        return "The FP16 run has log-probs that are not finite."
    limit = bf16.logprob_error_nats
    if limit is not None and plain.logprob_error_nats > limit:
        return (
            f"The FP16 run is finite, but further from FP32 than BF16 is ({_error(plain.logprob_error_nats)} against "
            f"{_error(limit)} nats)."
        )
    if all(one.relative_error is None for one in plain.scales):
        return (
            "The FP16 forward pass and its loss are finite, but the backward pass is not at any loss scale: the "
            f"gradient overflows in {plain.scales[0].nonfinite[0]}."
        )
    return "The FP16 gradient is finite only at loss scales where too much of it underflows."


def _scale_advice(trial: Trial) -> str:
    return f"train --train-dtype fp16 with a dynamic loss scale that starts within {_scales(trial)} ({_INITIAL_SCALE})"


def _scales(trial: Trial) -> str:
    if trial.from_exponent is None:
        return "none"
    if trial.from_exponent == trial.to_exponent:
        return f"2^{trial.from_exponent}"
    return f"2^{trial.from_exponent} to 2^{trial.to_exponent}"


def _error(error: float | None) -> str:
    return "not finite" if error is None else write_number(error)


def _percent(share: float) -> str:
    if 0 < share < 1e-4:
        return "< 0.01 %"
    return "> 99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"


def _listed(names: list[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"
