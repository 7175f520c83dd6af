"""From findings to a verdict; every claim is of a run that was made."""

from typing import Final

from mismatch_probe.config.train import LossScaleSettings
from mismatch_probe.headroom.sentences import (
    activation_sentences,
    gradient_sentences,
    listed,
    logprob_sentence,
    parts_in_fp32,
    trial_sentence,
    weights_sentence,
)
from mismatch_probe.headroom.trial import fits, is_close
from mismatch_probe.headroom.weights import is_too_small
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.records.headroom import (
    ActivationFindings,
    GradientFindings,
    HeadroomCode,
    HeadroomVerdict,
    Trial,
    WeightFindings,
)
from mismatch_probe.report.findings.gradients import fitting_scales, write_error

_BF16: Final = "train and sample in BF16 (--train-dtype bf16 --infer-dtype bf16)"


def judge_weights(weights: WeightFindings) -> HeadroomVerdict:
    """What the stored weights alone say."""
    total = weights.total
    evidence = [weights_sentence(weights)]
    if total.num_nonfinite:
        return HeadroomVerdict(
            code=HeadroomCode.DOES_NOT_FIT,
            sentence=f"{write_count(total.num_nonfinite)} stored weights are infinite or NaN, most in "
            f"{weights.worst[0].tensor}: the checkpoint is damaged in any format.",
            evidence=evidence,
            advice=["download or write the checkpoint again"],
        )
    large = [tensor.tensor for tensor in weights.worst if tensor.num_overflowed]
    small = [tensor.tensor for tensor in weights.worst if not tensor.num_overflowed and is_too_small(tensor)]
    troubles = [(large, "which overflow FP16"), (small, "which are too small for FP16 to hold as well as BF16 does")]
    exceptions = [f"{listed(tensors)}, {trouble}" for tensors, trouble in troubles if tensors]
    if exceptions:
        return HeadroomVerdict(
            code=HeadroomCode.FITS_EXCEPT,
            sentence=f"The weights fit FP16 except {', and '.join(exceptions)}; nothing was run.",
            evidence=evidence,
            advice=["run headroom without --weights-only, which tries these modules in FP32", f"or {_BF16}"],
        )
    return HeadroomVerdict(
        code=HeadroomCode.FITS,
        sentence="The weights fit FP16; activations and gradients were not looked at.",
        evidence=evidence,
        advice=["run headroom without --weights-only before training in FP16"],
    )


def judge_headroom(
    weights: WeightFindings,
    activations: ActivationFindings,
    gradients: GradientFindings,
    plain: Trial,
    bf16: Trial,
    advised: Trial | None,
    overflowing: list[str],
) -> HeadroomVerdict:
    """What the plain FP16 run says, and where it does not fit, the run with modules in FP32.

    `overflowing` are modules with weights that FP16 cannot hold, which no response need have come by.
    """
    evidence = [
        weights_sentence(weights),
        *activation_sentences(activations),
        logprob_sentence(plain, bf16),
        *gradient_sentences(gradients, plain, bf16),
    ]
    if fits(plain, bf16) and not overflowing:
        unscaled = plain.from_exponent == 0
        need = "even without a loss scale" if unscaled else f"with a loss scale of {fitting_scales(plain)}"
        return HeadroomVerdict(
            code=HeadroomCode.FITS if unscaled else HeadroomCode.FITS_WITH_LOSS_SCALE,
            sentence=f"The checkpoint fits FP16, weights, activations and gradients, {need}.",
            evidence=evidence,
            advice=[_scale_advice(plain)],
        )
    trouble = _trouble(plain, activations, gradients, bf16, overflowing)
    if advised is not None:
        evidence.append(trial_sentence(advised, does_fit=fits(advised, bf16)))
    if advised is not None and fits(advised, bf16):
        return HeadroomVerdict(
            code=HeadroomCode.FITS_EXCEPT,
            sentence=f"{trouble} With {parts_in_fp32(advised)} in FP32 and a loss scale of {fitting_scales(advised)} "
            "it fits.",
            evidence=evidence,
            advice=[
                _BF16,
                f"or keep {parts_in_fp32(advised)} in FP32 on both sides, as was tried here on the training path",
            ],
        )
    return HeadroomVerdict(
        code=HeadroomCode.DOES_NOT_FIT,
        sentence=f"{trouble} The checkpoint does not fit FP16.",
        evidence=evidence,
        advice=[_BF16],
    )


def _trouble(
    plain: Trial, activations: ActivationFindings, gradients: GradientFindings, bf16: Trial, overflowing: list[str]
) -> str:
    """What keeps the plain FP16 run from fitting."""
    if plain.first_nonfinite is not None:
        return f"Activations overflow FP16, first at {plain.first_nonfinite}."
    if plain.logprob_error_nats is None:
        return "The FP16 run's log-probs are not finite."
    troubles = [f"Weights of {listed(overflowing)} overflow FP16."] if overflowing else []
    if not is_close(plain, bf16):
        small = f"; the results of {activations.too_small[0].module} are too small" if activations.too_small else ""
        troubles.append(
            f"The FP16 forward pass is further from FP32 than BF16's, {write_number(plain.logprob_error_nats)} against "
            f"{write_error(bf16.logprob_error_nats)} nats{small}."
        )
    largest = gradients.activations[0].name
    if all(scale.relative_error is None for scale in plain.scales):
        troubles.append(
            "Forward pass and loss are finite in FP16, but the backward pass overflows at every loss scale; the "
            f"largest gradient is at {largest}."
        )
    elif plain.from_exponent is None:
        troubles.append(
            "The FP16 gradient is finite only at loss scales where it is further from FP32 than BF16's; the largest is "
            f"at {largest}."
        )
    return " ".join(troubles)


def _scale_advice(trial: Trial) -> str:
    assert trial.from_exponent is not None
    assert trial.to_exponent is not None
    initial = LossScaleSettings().initial
    if 2.0**trial.from_exponent <= initial <= 2.0**trial.to_exponent:
        return f"train --train-dtype fp16 as it is: its dynamic loss scale starts at {initial:,.0f}, which fits"
    middle = 2.0 ** ((trial.from_exponent + trial.to_exponent) // 2)
    return f"train --train-dtype fp16 with loss_scale.initial = {middle:.0f}; the default, {initial:,.0f}, does not fit"
