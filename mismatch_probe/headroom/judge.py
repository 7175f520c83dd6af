"""From findings to a verdict and its sentences; every claim is of a run that was made."""

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.config.train import LossScaleSettings
from mismatch_probe.dtypes import FP16_LARGEST
from mismatch_probe.headroom.findings import is_too_small
from mismatch_probe.headroom.passes import fits, is_close
from mismatch_probe.notation import (
    join_names,
    write_count,
    write_error,
    write_many,
    write_number,
    write_power,
    write_share,
)
from mismatch_probe.records.examinations import (
    MOST_NAMES,
    ActivationFindings,
    GradientFindings,
    HeadroomVerdict,
    OperationRange,
    PrecisionTrial,
    WeightFindings,
    leaves_gradient,
)


def judge_weights(weights: WeightFindings) -> HeadroomVerdict:
    """What the stored weights alone say."""
    total = weights.total
    evidence = [_weights_sentence(weights)]
    if total.num_nonfinite:
        number, tensor = write_count(total.num_nonfinite), weights.worst[0].tensor
        return HeadroomVerdict.of(HeadroomCode.DOES_NOT_FIT, evidence, "damaged", number=number, tensor=tensor)
    large = [tensor.tensor for tensor in weights.worst if tensor.num_overflowed]
    small = [tensor.tensor for tensor in weights.worst if not tensor.num_overflowed and is_too_small(tensor)]
    troubles = [(large, "which overflow FP16"), (small, "which are too small for FP16 to hold as well as BF16 does")]
    exceptions = [f"{join_names(tensors, MOST_NAMES)}, {trouble}" for tensors, trouble in troubles if tensors]
    if exceptions:
        return HeadroomVerdict.of(HeadroomCode.FITS_EXCEPT, evidence, "weights", exceptions=", and ".join(exceptions))
    return HeadroomVerdict.of(HeadroomCode.FITS, evidence, "weights")


def judge_headroom(
    weights: WeightFindings,
    activations: ActivationFindings,
    gradients: GradientFindings,
    plain: PrecisionTrial,
    bf16: PrecisionTrial,
    advice: PrecisionTrial | None,
    overflowing: list[str],
) -> HeadroomVerdict:
    """What the plain FP16 run says, and where it does not fit, the run with modules in FP32.

    `overflowing` are modules with weights that FP16 cannot hold, which no response need have come by.
    """
    evidence = [
        _weights_sentence(weights),
        *_activation_sentences(activations),
        _logprob_sentence(plain, bf16),
        *_gradient_sentences(gradients, plain, bf16),
    ]
    if fits(plain, bf16) and not overflowing:
        if not leaves_gradient(plain, bf16):
            return HeadroomVerdict.of(HeadroomCode.GRADIENTS_NOT_MEASURED, evidence)
        code = HeadroomCode.FITS if plain.from_exponent == 0 else HeadroomCode.FITS_WITH_LOSS_SCALE
        return HeadroomVerdict.of(code, evidence, scales=plain.fitting_scales, scale=_scale_advice(plain))
    trouble = _trouble(plain, activations, gradients, bf16, overflowing)
    if advice is not None:
        evidence.append(_trial_sentence(advice, does_fit=fits(advice, bf16)))
    if advice is not None and fits(advice, bf16):
        return HeadroomVerdict.of(
            HeadroomCode.FITS_EXCEPT,
            evidence,
            "" if leaves_gradient(advice, bf16) else "no gradient",
            trouble=trouble,
            parts=advice.parts_in_fp32,
            scales=advice.fitting_scales,
        )
    return HeadroomVerdict.of(HeadroomCode.DOES_NOT_FIT, evidence, trouble=trouble)


def _trouble(
    plain: PrecisionTrial,
    activations: ActivationFindings,
    gradients: GradientFindings,
    bf16: PrecisionTrial,
    overflowing: list[str],
) -> str:
    """What keeps the plain FP16 run from fitting."""
    if plain.first_nonfinite is not None:
        return f"Activations overflow FP16, first at {plain.first_nonfinite}."
    if plain.logprob_error_nats is None:
        return "The FP16 run's log-probs are not finite."
    troubles = [f"Weights of {join_names(overflowing, MOST_NAMES)} overflow FP16."] if overflowing else []
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
    elif plain.from_exponent is None and leaves_gradient(plain, bf16):
        troubles.append(
            "The FP16 gradient is finite only at loss scales where it is further from FP32 than BF16's; the largest is "
            f"at {largest}."
        )
    return " ".join(troubles)


def _scale_advice(trial: PrecisionTrial) -> str:
    assert trial.from_exponent is not None
    assert trial.to_exponent is not None
    initial = LossScaleSettings().initial
    if 2.0**trial.from_exponent <= initial <= 2.0**trial.to_exponent:
        return f"train --train-dtype fp16 as it is: its dynamic loss scale starts at {initial:,.0f}, which fits"
    middle = 2.0 ** ((trial.from_exponent + trial.to_exponent) // 2)
    return f"train --train-dtype fp16 with loss_scale.initial = {middle:.0f}; the default, {initial:,.0f}, does not fit"


def _weights_sentence(weights: WeightFindings) -> str:
    total = weights.total
    return (
        f"weights: {write_count(total.num_values)} in {write_many(weights.num_tensors, 'tensor')}, the largest "
        f"{write_number(total.largest)} of {FP16_LARGEST:,.0f}; in FP16 {write_count(total.num_overflowed)} overflow, "
        f"{write_count(total.num_flushed)} become zero ({write_share(total.num_flushed, total.num_values)}), "
        f"{write_count(total.num_subnormal)} are subnormal; relative error {write_number(total.relative_error)}"
    )


def _activation_sentences(activations: ActivationFindings) -> list[str]:
    """The result with the least room; then, where there are any, results too small for FP16."""
    tightest, small = activations.tightest[0], activations.too_small
    sample_words = (
        f"{write_many(activations.num_tokens, 'token')} of {write_many(activations.num_sequences, 'sequence')}"
    )
    first = activations.first_nonfinite
    end = "" if first is None else f"; the FP16 run is first not finite at {first}"
    sentences = [
        f"activations: the largest result that FP16 has to hold is {_with_margin(tightest)}, over {sample_words}{end}"
    ]
    if small:
        sentences.append(
            "activations: some results are too small for FP16 to hold as well as BF16 does, most of all "
            f"{_place(small[0])}: up to {write_number(small[0].largest)}, relative error "
            f"{write_error(small[0].relative_error)}"
        )
    return sentences


def _logprob_sentence(plain: PrecisionTrial, bf16: PrecisionTrial) -> str:
    fp16 = plain.logprob_error_nats
    own = "not finite in FP16" if fp16 is None else f"{write_number(fp16)} nats in FP16"
    sentence = (
        f"log-probs: root mean square error against FP32 {own}, {write_error(bf16.logprob_error_nats)} nats in BF16"
    )
    if plain.further_share is None:
        return sentence
    return f"{sentence}; FP16 is the further one on {_percent(plain.further_share)} of the tokens that are off"


def _gradient_sentences(gradients: GradientFindings, plain: PrecisionTrial, bf16: PrecisionTrial) -> list[str]:
    """What underflows, what overflows, and what AdamW's moments would lose."""
    underflow, largest, optimizer = gradients.underflow[0], gradients.activations[0], gradients.optimizer
    rewards = "stand-in rewards, because none differed" if gradients.stand_in_rewards else "the task's rewards"
    sentences = [
        f"gradients of {gradients.objective} over {write_many(gradients.num_responses, 'response')} ({rewards}): "
        f"without a loss scale {_percent(underflow.activations_flushed)} of the activations' and "
        f"{_percent(underflow.parameters_flushed)} of the weights' are zero in FP16; the largest is "
        f"{write_number(largest.largest)} at {largest.name}; twice the responses need twice the scale"
    ]
    if plain.scales and leaves_gradient(plain, bf16):
        bad = next((scale for scale in plain.scales if scale.relative_error is None), None)
        end = "" if bad is None else f"; at {write_power(2, bad.exponent)} {_overflowing(bad.num_nonfinite)}"
        sentences.append(
            f"FP16 backward passes: {plain.fitting_scales} fits; smallest relative error "
            f"{write_error(plain.gradient_error)} against FP32, {write_error(bf16.gradient_error)} in BF16{end}"
        )
    if not leaves_gradient(plain, bf16):
        sentences.append(
            "in FP16 and in BF16 the error is as large as the gradient itself: these responses leave next to no "
            "gradient, and whether a loss scale fits was not measured"
        )
    sentences.append(
        f"optimizer: AdamW's moments stay in FP32; in FP16 {_percent(optimizer.first_moment_flushed)} of the first and "
        f"{_percent(optimizer.second_moment_flushed)} of the second would be zero"
    )
    return sentences


def _trial_sentence(trial: PrecisionTrial, *, does_fit: bool) -> str:
    """What came of a run with modules in FP32."""
    if trial.first_nonfinite is not None:
        end = f"not finite, first at {trial.first_nonfinite}"
    else:
        end = (
            f"log-probs {write_error(trial.logprob_error_nats)} nats from FP32, gradient "
            f"{write_error(trial.gradient_error)}, loss scale {trial.fitting_scales}"
        )
    return f"tried with {trial.parts_in_fp32} in FP32: {'fits' if does_fit else 'does not fit'}; {end}"


def _with_margin(operation: OperationRange) -> str:
    if operation.margin_bits is None:
        return f"{write_number(operation.largest)} at {_place(operation)}"
    side = "below" if operation.margin_bits >= 0 else "above"
    bits = f"{abs(operation.margin_bits):.1f} bits {side} {FP16_LARGEST:,.0f}"
    return f"{write_number(operation.largest)} at {_place(operation)}, {bits}"


def _place(operation: OperationRange) -> str:
    return f"{operation.module or 'the model'} ({operation.operation})"


def _percent(share: float) -> str:
    if 0 < share < 1e-4:
        return "< 0.01 %"
    return "> 99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"


def _overflowing(num_parameters: int) -> str:
    if num_parameters == 1:
        return "the gradient of 1 parameter overflows"
    return f"the gradients of {num_parameters} parameters overflow"
