"""What each loss scale does to the gradients of an RL loss in FP16."""

from mismatch_probe.notation import ABSENT, write_error, write_many, write_number, write_power
from mismatch_probe.records.examinations import (
    GradientFindings,
    GradientRange,
    PrecisionTrial,
    ScaleTrial,
    ScaleUnderflow,
    leaves_gradient,
)
from mismatch_probe.report.figures.limits import Marks, Series, draw
from mismatch_probe.report.names import PairStyle, visible
from mismatch_probe.report.view import Block, Column, Figure, Heading, Note, Panel, Section, Table

GRADIENT_STYLES = {
    "gradients of activations": PairStyle("truncate", (), "D"),
    "gradients of weights": PairStyle("mask", (6, 2), "o"),
}
_ACTIVATIONS, _WEIGHTS = GRADIENT_STYLES.values()
_AXIS = "loss scale"


def gradients(findings: GradientFindings, plain: PrecisionTrial, bf16: PrecisionTrial) -> Section:
    blocks: list[Block] = []
    if plain.scales:
        blocks.append(
            Figure(
                "figure-headroom-gradients",
                "How to read it: the dotted line is BF16's error; a loss scale fits where FP16's lies below it. "
                "Crosses at the top are scales at which a gradient overflows.",
                [_error_panel(plain, bf16)],
                [_error_table(plain)],
            )
        )
    else:
        blocks.append(Note("No backward pass was tried in FP16: its forward pass is not finite."))
    blocks += [_largest("activations", findings.activations), _largest("weights", findings.parameters)]
    rewards = "stand-in rewards, since none differed" if findings.stand_in_rewards else "the task's rewards"
    return Section(
        "headroom-gradients",
        "Gradients",
        f"Of {findings.objective} over {write_many(findings.num_responses, 'response')} with {rewards}; "
        f"loss {write_number(findings.loss)}, norm {write_number(findings.norm)} in FP32.",
        blocks,
    )


def underflow_panel(
    findings: GradientFindings, trial: PrecisionTrial | None, yardstick: PrecisionTrial | None
) -> Panel:
    """Shares of the gradients that FP16 makes zero at each loss scale, and the scales that fit."""
    exponents = [underflow.exponent for underflow in findings.underflow]
    at_scale_1 = findings.underflow[0]
    heading = Heading(
        "plot-headroom-underflow",
        "Gradients that become zero",
        f"without a loss scale {write_number(at_scale_1.activations_flushed)} of the activations' gradients and "
        f"{write_number(at_scale_1.parameters_flushed)} of the weights'",
        "Share of the gradients that FP16 would make zero, by loss scale.",
    )
    series = [
        Series(
            "gradients of activations",
            exponents,
            [underflow.activations_flushed for underflow in findings.underflow],
            _ACTIVATIONS,
        ),
        Series(
            "gradients of weights",
            exponents,
            [underflow.parameters_flushed for underflow in findings.underflow],
            _WEIGHTS,
        ),
    ]
    return draw(
        heading, series, _AXIS, "share that becomes zero", marks=Marks(span=_span(trial, yardstick)), write_x=_power
    )


def underflow_table(
    findings: GradientFindings, trial: PrecisionTrial | None, yardstick: PrecisionTrial | None
) -> Table:
    errors = {} if trial is None else {scale.exponent: scale.relative_error for scale in trial.scales}
    span = _span(trial, yardstick)

    def fits(row: ScaleUnderflow) -> str:
        return "yes" if span is not None and span[0] <= row.exponent <= span[1] else ""

    columns: list[Column[ScaleUnderflow]] = [
        Column(_AXIS, lambda row: _power(row.exponent)),
        Column("act.: zero", lambda row: _percent(row.activations_flushed)),
        Column("act.: subnormal", lambda row: _percent(row.activations_subnormal)),
        Column("weights: zero", lambda row: _percent(row.parameters_flushed)),
        Column("weights: subn.", lambda row: _percent(row.parameters_subnormal)),
        Column("largest", lambda row: write_number(row.largest_scaled) + (" overflows" if row.overflows else "")),
        Column("true run's error", lambda row: write_error(errors[row.exponent]) if row.exponent in errors else ABSENT),
        Column("fits", fits),
    ]
    return Table.of("Gradients of activations (act.) and of weights by loss scale", findings.underflow, columns)


def fitting_scales(trial: PrecisionTrial, yardstick: PrecisionTrial | None) -> str:
    """The loss scales that fit. Without a gradient to measure them on, what an earlier version named does not count."""
    is_measured = yardstick is not None and leaves_gradient(trial, yardstick)
    return trial.fitting_scales if is_measured else "not measured"


def _error_panel(plain: PrecisionTrial, bf16: PrecisionTrial) -> Panel:
    exponents = [scale.exponent for scale in plain.scales]
    heading = Heading(
        "plot-headroom-errors",
        "Error of the FP16 gradient",
        f"smallest {write_error(plain.gradient_error)} against FP32, {write_error(bf16.gradient_error)} in BF16; "
        f"fitting scales {fitting_scales(plain, bf16)}",
        "Norm of the difference from the FP32 gradient, over that one's norm.",
    )
    yardstick = bf16.gradient_error
    marks = Marks(
        limit=None if yardstick is None else (yardstick, f"BF16: {write_number(yardstick)}"),
        span=_span(plain, bf16),
        crosses=[scale.exponent for scale in plain.scales if scale.relative_error is None],
    )
    series = [Series("FP16", exponents, [scale.relative_error for scale in plain.scales], _WEIGHTS)]
    return draw(heading, series, _AXIS, "relative error", marks=marks, write_x=_power)


def _error_table(plain: PrecisionTrial) -> Table:
    columns: list[Column[ScaleTrial]] = [
        Column(_AXIS, lambda scale: _power(scale.exponent)),
        Column("relative error", lambda scale: write_error(scale.relative_error)),
        Column("not finite", lambda scale: str(scale.num_nonfinite)),
        Column("the first of them", lambda scale: visible(", ".join(scale.nonfinite) or ABSENT), is_text=True),
    ]
    return Table.of("True FP16 backward passes", plain.scales, columns, is_stacked=True)


def _largest(of: str, ranges: list[GradientRange]) -> Table:
    columns: list[Column[GradientRange]] = [
        Column("gradient of", lambda range_: visible(range_.name)),
        Column("largest, unscaled", lambda range_: write_number(range_.largest)),
        Column("bits left", lambda range_: ABSENT if range_.margin_bits is None else f"{range_.margin_bits:.1f}"),
        Column("zero without a loss scale", lambda range_: _percent(range_.flushed_unscaled)),
    ]
    return Table.of(f"Largest gradients of {of}", ranges, columns, is_folded=True)


def _span(trial: PrecisionTrial | None, yardstick: PrecisionTrial | None) -> tuple[float, float] | None:
    """The exponents of the scales that fit; none where there was no gradient to measure them on."""
    if trial is None or trial.from_exponent is None or trial.to_exponent is None:
        return None
    if yardstick is not None and not leaves_gradient(trial, yardstick):
        return None
    return trial.from_exponent, trial.to_exponent


def _power(exponent: float) -> str:
    return write_power(2, round(exponent))


def _percent(share: float) -> str:
    return "< 0.01 %" if 0 < share < 1e-4 else f"{100 * share:.3g} %"
