"""What each loss scale does to the gradients of an RL loss in FP16."""

import re

from mismatch_probe.notation import ABSENT, write_many, write_number, write_power
from mismatch_probe.records.headroom import GradientFindings, GradientRange, Trial
from mismatch_probe.report.figures.limits import Marks, Series, draw
from mismatch_probe.report.names import PairStyle, visible
from mismatch_probe.report.view import Block, Cell, Figure, Heading, Note, Panel, Section, Table

GRADIENT_STYLES = {
    "gradients of activations": PairStyle("truncate", (), "D"),
    "gradients of weights": PairStyle("mask", (6, 2), "o"),
}
_ACTIVATIONS, _WEIGHTS = GRADIENT_STYLES.values()
_AXIS = "loss scale"


def gradients(findings: GradientFindings, plain: Trial, bf16: Trial) -> Section:
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


def fitting_scales(trial: Trial) -> str:
    """The loss scales that fit: `2³ to 2²¹`."""
    if trial.from_exponent is None:
        return "none"
    low, high = (_power(exponent) for exponent in (trial.from_exponent, trial.to_exponent or 0))
    return low if low == high else f"{low} to {high}"


def underflow_panel(findings: GradientFindings, trial: Trial | None) -> Panel:
    """Shares of the gradients that FP16 makes zero at each loss scale, and the scales that fit."""
    exponents = [underflow.exponent for underflow in findings.underflow]
    unscaled = findings.underflow[0]
    heading = Heading(
        "plot-headroom-underflow",
        "Gradients that become zero",
        f"without a loss scale {write_number(unscaled.activations_flushed)} of the activations' gradients and "
        f"{write_number(unscaled.parameters_flushed)} of the weights'",
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
    return draw(heading, series, _AXIS, "share that becomes zero", marks=Marks(span=_span(trial)), write_x=_power)


def underflow_table(findings: GradientFindings, trial: Trial | None) -> Table:
    errors = {} if trial is None else {scale.exponent: scale.relative_error for scale in trial.scales}
    span = _span(trial)
    rows: list[list[Cell]] = [
        [
            _power(underflow.exponent),
            *(
                _percent(share)
                for share in (
                    underflow.activations_flushed,
                    underflow.activations_subnormal,
                    underflow.parameters_flushed,
                    underflow.parameters_subnormal,
                )
            ),
            write_number(underflow.largest_scaled) + (" overflows" if underflow.overflows else ""),
            write_error(errors[underflow.exponent]) if underflow.exponent in errors else ABSENT,
            "yes" if span is not None and span[0] <= underflow.exponent <= span[1] else "",
        ]
        for underflow in findings.underflow
    ]
    columns = [
        _AXIS,
        "act.: zero",
        "act.: subnormal",
        "weights: zero",
        "weights: subn.",
        "largest",
        "true run's error",
        "fits",
    ]
    return Table("Gradients of activations (act.) and of weights by loss scale", columns, rows)


def _error_panel(plain: Trial, bf16: Trial) -> Panel:
    exponents = [scale.exponent for scale in plain.scales]
    heading = Heading(
        "plot-headroom-errors",
        "Error of the FP16 gradient",
        f"smallest {write_error(plain.gradient_error)} against FP32, {write_error(bf16.gradient_error)} in BF16; "
        f"fitting scales {fitting_scales(plain)}",
        "Norm of the difference from the FP32 gradient, over that one's norm.",
    )
    yardstick = bf16.gradient_error
    marks = Marks(
        limit=None if yardstick is None else (yardstick, f"BF16: {write_number(yardstick)}"),
        span=_span(plain),
        crosses=[scale.exponent for scale in plain.scales if scale.relative_error is None],
    )
    series = [Series("FP16", exponents, [scale.relative_error for scale in plain.scales], _WEIGHTS)]
    return draw(heading, series, _AXIS, "relative error", marks=marks, write_x=_power)


def _error_table(plain: Trial) -> Table:
    rows: list[list[Cell]] = [
        [
            _power(scale.exponent),
            write_error(scale.relative_error),
            str(scale.num_nonfinite),
            visible(", ".join(scale.nonfinite) or ABSENT),
        ]
        for scale in plain.scales
    ]
    columns = [_AXIS, "relative error", "not finite", "the first of them"]
    return Table("True FP16 backward passes", columns, rows, text_columns=frozenset({3}), stacked=True)


def _largest(of: str, ranges: list[GradientRange]) -> Table:
    rows: list[list[Cell]] = [
        [
            visible(range_.name),
            write_number(range_.largest),
            ABSENT if range_.margin_bits is None else f"{range_.margin_bits:.1f}",
            _percent(range_.flushed_unscaled),
        ]
        for range_ in ranges
    ]
    columns = ["gradient of", "largest, unscaled", "bits left", "zero without a loss scale"]
    return Table(f"Largest gradients of {of}", columns, rows, folded=True)


def _span(trial: Trial | None) -> tuple[float, float] | None:
    if trial is None or trial.from_exponent is None or trial.to_exponent is None:
        return None
    return trial.from_exponent, trial.to_exponent


def _power(exponent: float) -> str:
    return write_power(2, round(exponent))


def with_powers(text: str) -> str:
    """`2^3` of a sentence as `2³`."""
    return re.sub(r"\b2\^(\d+)", lambda power: write_power(2, int(power[1])), text)


def write_error(error: float | None) -> str:
    return "not finite" if error is None else write_number(error)


def _percent(share: float) -> str:
    return "< 0.01 %" if 0 < share < 1e-4 else f"{100 * share:.3g} %"
