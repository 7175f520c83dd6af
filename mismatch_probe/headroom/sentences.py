"""What a person reads of each part of the findings, and the answer on one screen."""

from dataclasses import replace

from rich.console import Console

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.dtypes import FP16_LARGEST
from mismatch_probe.notation import write_count, write_many, write_number, write_power, write_share
from mismatch_probe.records.headroom import (
    ActivationFindings,
    GradientFindings,
    Headroom,
    LayerRange,
    OperationRange,
    Trial,
    WeightFindings,
)
from mismatch_probe.report.findings.gradients import fitting_scales, underflow_table, with_powers, write_error
from mismatch_probe.report.findings.headroom import layers_table
from mismatch_probe.report.screen import print_advice, print_blank_line, print_line, print_titled
from mismatch_probe.report.view import Table

_MOST_NAMES = 4


def weights_sentence(weights: WeightFindings) -> str:
    total = weights.total
    return (
        f"weights: {write_count(total.num_values)} in {write_many(weights.num_tensors, 'tensor')}, the largest "
        f"{write_number(total.largest)} of {FP16_LARGEST:,.0f}; in FP16 {write_count(total.num_overflowed)} overflow, "
        f"{write_count(total.num_flushed)} become zero ({write_share(total.num_flushed, total.num_values)}), "
        f"{write_count(total.num_subnormal)} are subnormal; relative error {write_number(total.relative_error)}"
    )


def activation_sentences(activations: ActivationFindings) -> list[str]:
    """The result with the least room; then, where there are any, results too small for FP16."""
    tightest, small = activations.tightest[0], activations.too_small
    over = f"{write_many(activations.num_tokens, 'token')} of {write_many(activations.num_sequences, 'sequence')}"
    first = activations.first_nonfinite
    end = "" if first is None else f"; the FP16 run is first not finite at {first}"
    sentences = [f"activations: the largest result that FP16 has to hold is {_with_margin(tightest)}, over {over}{end}"]
    if small:
        sentences.append(
            "activations: some results are too small for FP16 to hold as well as BF16 does, most of all "
            f"{_place(small[0])}: up to {write_number(small[0].largest)}, relative error "
            f"{write_error(small[0].relative_error)}"
        )
    return sentences


def logprob_sentence(plain: Trial, bf16: Trial) -> str:
    fp16 = plain.logprob_error_nats
    own = "not finite in FP16" if fp16 is None else f"{write_number(fp16)} nats in FP16"
    told = f"log-probs: root mean square error against FP32 {own}, {write_error(bf16.logprob_error_nats)} nats in BF16"
    if plain.further_share is None:
        return told
    return f"{told}; FP16 is the further one on {_percent(plain.further_share)} of the tokens that are off"


def gradient_sentences(gradients: GradientFindings, plain: Trial, bf16: Trial) -> list[str]:
    """What underflows, what overflows, and what AdamW's moments would lose."""
    unscaled, largest, optimizer = gradients.underflow[0], gradients.activations[0], gradients.optimizer
    rewards = "stand-in rewards, because none differed" if gradients.stand_in_rewards else "the task's rewards"
    sentences = [
        f"gradients of {gradients.objective} over {write_many(gradients.num_responses, 'response')} ({rewards}): "
        f"without a loss scale {_percent(unscaled.activations_flushed)} of the activations' and "
        f"{_percent(unscaled.parameters_flushed)} of the weights' are zero in FP16; the largest is "
        f"{write_number(largest.largest)} at {largest.name}; twice the responses need twice the scale"
    ]
    if plain.scales:
        bad = next((scale for scale in plain.scales if scale.relative_error is None), None)
        end = "" if bad is None else f"; at {write_power(2, bad.exponent)} {_overflowing(bad.num_nonfinite)}"
        sentences.append(
            f"FP16 backward passes: {fitting_scales(plain)} fits; smallest relative error "
            f"{write_error(plain.gradient_error)} against FP32, {write_error(bf16.gradient_error)} in BF16{end}"
        )
    sentences.append(
        f"optimizer: AdamW's moments stay in FP32; in FP16 {_percent(optimizer.first_moment_flushed)} of the first and "
        f"{_percent(optimizer.second_moment_flushed)} of the second would be zero"
    )
    return sentences


def trial_sentence(trial: Trial, *, does_fit: bool) -> str:
    """What came of a run with modules in FP32."""
    if trial.first_nonfinite is not None:
        end = f"not finite, first at {trial.first_nonfinite}"
    else:
        end = (
            f"log-probs {write_error(trial.logprob_error_nats)} nats from FP32, gradient "
            f"{write_error(trial.gradient_error)}, loss scale {fitting_scales(trial)}"
        )
    return f"tried with {parts_in_fp32(trial)} in FP32: {'fits' if does_fit else 'does not fit'}; {end}"


def parts_in_fp32(trial: Trial) -> str:
    """What a trial has in FP32."""
    names = trial.modules_in_fp32
    if trial.residual_in_fp32_from is None:
        return listed(names)
    return listed([f"the residual stream from {trial.residual_in_fp32_from} on", *names])


def listed(names: list[str]) -> str:
    """`a, b and c`; of many the first ones and how many more."""
    if len(names) > _MOST_NAMES:
        return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


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


_STYLES = {
    HeadroomCode.FITS: "bold green",
    HeadroomCode.FITS_WITH_LOSS_SCALE: "bold green",
    HeadroomCode.FITS_EXCEPT: "bold yellow",
    HeadroomCode.DOES_NOT_FIT: "bold red",
}
_MOST_LAYERS = 12


def render_headroom(headroom: Headroom, console: Console) -> None:
    """Verdict, what shows it, the layers nearest to the limit, the loss scales, and what to do."""
    print_blank_line(console)
    print_line(console, with_powers(headroom.verdict.sentence), _STYLES[headroom.verdict.code])
    print_line(console, "")
    for line in headroom.verdict.evidence:
        print_line(console, with_powers(line))
    if headroom.activations is not None:
        print_titled(console, layers_table(_nearest(headroom.activations.layers)))
    tried = next((trial for trial in (headroom.plain, headroom.advised) if trial is not None and trial.scales), None)
    if tried is not None and headroom.gradients is not None:
        print_titled(console, _scales(headroom.gradients, tried))
    if headroom.sampled_by is not None:
        print_line(console, f"responses sampled by {headroom.sampled_by}; device {headroom.device}", "dim")
    print_advice(console, [with_powers(advice) for advice in headroom.verdict.advice])


def _nearest(layers: list[LayerRange]) -> list[LayerRange]:
    """The layers with the least room, in the model's order."""
    nearest = sorted(layers, key=lambda layer: float("-inf") if layer.margin_bits is None else layer.margin_bits)
    shown = {layer.layer for layer in nearest[:_MOST_LAYERS]}
    return [layer for layer in layers if layer.layer in shown]


def _scales(gradients: GradientFindings, trial: Trial) -> Table:
    """Every other loss scale that was tried, and those between which FP16 fits."""
    ends = (trial.from_exponent, trial.to_exponent)
    tried = {scale.exponent for scale in trial.scales if not scale.exponent % 2 or scale.exponent in ends}
    underflow = [underflow for underflow in gradients.underflow if underflow.exponent in tried]
    above = f", with {parts_in_fp32(trial)} in FP32" if trial.modules_in_fp32 or trial.residual_in_fp32_from else ""
    table = underflow_table(gradients.model_copy(update={"underflow": underflow}), trial)
    return replace(table, caption=f"{table.caption}{above}")
