"""`headroom` on a page: the verdict, weights, activations of each layer against FP16's limit, gradients."""

import math
from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import ABSENT, Written, write_count, write_number, write_share
from mismatch_probe.records.headroom import (
    ActivationFindings,
    Headroom,
    HeadroomCode,
    LayerRange,
    OperationRange,
    Trial,
    WeightRange,
)
from mismatch_probe.report.figures.series import Marks, Series, draw
from mismatch_probe.report.findings.gradients import (
    GRADIENT_STYLES,
    fitting_scales,
    gradients,
    underflow_panel,
    underflow_table,
)
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Badge, Block, Cell, Figure, Heading, Note, Overview, Panel, Section, Table

_MOST_TENSORS: Final = 12

_BADGES = {
    HeadroomCode.FITS: Badge("clean", "fits"),
    HeadroomCode.FITS_WITH_LOSS_SCALE: Badge("clean", "fits with a loss scale"),
    HeadroomCode.FITS_EXCEPT: Badge("precision", "fits except some modules"),
    HeadroomCode.DOES_NOT_FIT: Badge("bug", "does not fit"),
}
_LINES = {
    "residual stream": PairStyle("fp16", (), "o"),
    "product inside the MLP": PairStyle("bf16", (6, 2), "s"),
    "query times key, before the scale": PairStyle("fp64", (1.5, 1.5), "^"),
}
_KEPT = {"fp16": "FP16", "fp32": "FP32", "kernel": "inside a kernel, FP32"}


def headroom_overview(found: Headroom) -> Overview:
    return Overview(
        subject="headroom",
        model=found.model,
        headline=found.verdict.sentence,
        badge=_BADGES[found.verdict.code],
        facts=_facts(found),
        advice=found.verdict.advice,
        table=_table(found),
        footnote="Bits left: how often a magnitude can double before it passes 65,504, FP16's largest number.",
        contrasts=[],
        figure=_figure(found),
    )


def headroom_sections(found: Headroom) -> list[Section]:
    """What stands under the overview, in the order in which it is to be read."""
    evidence = Note("Seen, each in a run that was made:", found.verdict.evidence)
    sections = [Section("headroom-evidence", "What shows it", "", [evidence]), _weights(found)]
    if found.activations is not None:
        sections.append(_activations(found.activations))
    if found.gradients is not None and found.plain is not None and found.bf16 is not None:
        sections.append(gradients(found.gradients, found.plain, found.bf16))
        sections.append(_tried(found, found.plain, found.bf16))
    return sections


def _facts(found: Headroom) -> list[str]:
    if found.activations is None:
        return [f"{write_count(found.weights.total.num_values)} weights; nothing was run"]
    responses, tokens = found.activations.num_sequences, found.activations.num_tokens
    return [
        f"{write_count(found.weights.total.num_values)} weights",
        f"{write_count(tokens)} tokens in {write_count(responses)} responses, sampled by {found.sampled_by}",
        f"device {found.device}",
    ]


def _table(found: Headroom) -> Table:
    total = found.weights.total
    largest = next((one.tensor for one in found.weights.worst if one.largest == total.largest), ABSENT)
    rows: list[list[Cell]] = [["largest weight", _magnitude(total.largest), visible(largest)]]
    if found.activations is not None:
        rows += [
            ["largest result held in FP16", _magnitude(one.largest), _place(one)]
            for one in found.activations.tightest[:1]
        ]
    if found.plain is not None and found.bf16 is not None:
        first, both = found.plain.first_nonfinite, (found.plain, found.bf16)
        rows += [
            ["every result finite", "yes" if first is None else "no", ABSENT if first is None else visible(first)],
            ["error of log-probs, rms nats", *_versus([one.logprob_error_nats for one in both])],
            ["error of the gradient", *_versus([one.gradient_error for one in both])],
            ["loss scales that fit", fitting_scales(found.plain), ABSENT],
        ]
    return Table("What was seen", ["", "FP16", "where, or BF16"], rows, text_columns=frozenset({2}), stacked=True)


def _magnitude(value: float | None) -> Cell:
    if not value:
        return "not finite" if value is None else "0"
    bits = math.log2(Dtype.FP16.largest / value)
    return Written(write_number(value), f"{abs(bits):.1f} bits {'left' if bits >= 0 else 'too large'}")


def _versus(errors: Sequence[float | None]) -> list[Cell]:
    fp16, bf16 = ("not finite" if error is None else write_number(error) for error in errors)
    return [fp16, f"BF16: {bf16}"]


def _place(one: OperationRange) -> Markup:
    return Markup("<code>{}</code> ({})").format(visible(one.module or "the model"), visible(one.operation))


def _figure(found: Headroom) -> Figure | None:
    if found.activations is None or found.gradients is None:
        return None
    fitting = found.plain is not None and found.plain.from_exponent is not None
    return Figure(
        "figure-headroom",
        "How to read it: on the left every point has to stay below the dotted line, and each factor of 2 below it is a "
        f"bit of room. On the right {'the shaded loss scales' if fitting else 'no loss scale'} fitted in a true run.",
        [_layers_panel(found.activations.layers), underflow_panel(found.gradients, found.plain)],
        [layers_table(found.activations.layers), underflow_table(found.gradients, found.plain)],
        key=[*_LINES.items(), *GRADIENT_STYLES.items()],
    )


def _layers_panel(layers: Sequence[LayerRange]) -> Panel:
    places = list(range(len(layers)))
    curves = [[getattr(one, name) for one in layers] for name in ("residual", "mlp_product", "attention_scores")]
    largest = [max((value for value in values if value is not None), default=0.0) for values in curves]
    heading = Heading(
        "plot-headroom-layers",
        "Largest magnitudes in each layer",
        "; ".join(f"{name} up to {write_number(value)}" for name, value in zip(_LINES, largest, strict=True)),
        "In FP32, over prompts and responses.",
    )
    return draw(
        heading,
        [Series(places, values, style) for values, style in zip(curves, _LINES.values(), strict=True)],
        "layer",
        "largest magnitude",
        marks=Marks(limit=(Dtype.FP16.largest, "65,504: FP16 ends here")),
    )


def layers_table(layers: Sequence[LayerRange]) -> Table:
    rows: list[list[Cell]] = [
        [
            one.layer,
            write_number(one.residual),
            ABSENT if one.margin_bits is None else f"{one.margin_bits:.1f}",
            write_number(one.mlp_product),
            write_number(one.attention_scores),
            write_number(one.attention_logits),
            write_number(one.outlier_ratio),
            ABSENT if one.outlier_channel is None else write_count(one.outlier_channel),
        ]
        for one in layers
    ]
    columns = [
        "layer",
        "residual",
        "bits left",
        "MLP product",
        "query times key",
        "into softmax",
        "outlier ratio",
        "its channel",
    ]
    return Table("Largest magnitudes in FP32", columns, rows, stacked=True)


def _weights(found: Headroom) -> Section:
    total = found.weights.total
    rows = [_weight_row(one) for one in (total, *found.weights.worst[:_MOST_TENSORS])]
    columns = ["tensor", "largest", "overflow", "subnormal", "become zero", "relative error", "stored as"]
    return Section(
        "headroom-weights",
        "Weights",
        f"Every one of {write_count(found.weights.num_tensors)} tensors was rounded to FP16; those that lose most are "
        "listed.",
        [Table("What rounding to FP16 does", columns, rows, text_columns=frozenset({6}))],
    )


def _weight_row(one: WeightRange) -> list[Cell]:
    shares = (one.num_overflowed, one.num_subnormal, one.num_flushed)
    return [
        visible(one.tensor),
        _magnitude(one.largest),
        *(write_share(count, one.num_values) if count else "0" for count in shares),
        write_number(one.relative_error),
        one.stored_as,
    ]


def _activations(found: ActivationFindings) -> Section:
    blocks: list[Block] = [_operations("The results with the least room", found.tightest)]
    if found.too_small:
        blocks.append(_operations("Results too small for FP16 to hold as well as BF16 does", found.too_small))
    lede = "Every operation of the model's own code, by module; what it was in FP32, and how FP16 keeps it."
    return Section("headroom-activations", "Activations", lede, blocks)


def _operations(caption: str, found: Sequence[OperationRange]) -> Table:
    rows: list[list[Cell]] = [
        [
            _place(one),
            _magnitude(one.largest),
            "n/a" if one.relative_error is None else write_number(one.relative_error),
            _KEPT[one.held_as],
            {True: "yes", False: "no", None: ABSENT}[one.finite_in_fp16],
        ]
        for one in found
    ]
    columns = ["operation", "largest", "rounding error", "kept in", "finite in FP16"]
    return Table(caption, columns, rows, text_columns=frozenset({3, 4}), stacked=True)


def _tried(found: Headroom, plain: Trial, bf16: Trial) -> Section:
    advised = [] if found.advised is None else [("FP16 as advised", found.advised)]
    rows: list[list[Cell]] = [
        [
            name,
            _raised(trial),
            "yes" if trial.first_nonfinite is None else visible(f"no: {trial.first_nonfinite}"),
            *("not finite" if error is None else write_number(error) for error in _errors(trial)),
            fitting_scales(trial) if trial.dtype == Dtype.FP16 else ABSENT,
        ]
        for name, trial in (("BF16", bf16), ("FP16", plain), *advised)
    ]
    columns = ["run", "in FP32", "finite", "log-prob error", "gradient error", "scales that fit"]
    return Section(
        "headroom-tried",
        "What was tried",
        "BF16 is the yardstick: FP16 fits where everything is finite and no further from FP32 than BF16 is.",
        [Table("True runs in 16 bits", columns, rows, text_columns=frozenset({1, 2}), stacked=True)],
    )


def _errors(trial: Trial) -> tuple[float | None, float | None]:
    return trial.logprob_error_nats, trial.gradient_error


def _raised(trial: Trial) -> Markup:
    names = [f"residual stream from {trial.residual_in_fp32_from} on"] if trial.residual_in_fp32_from else []
    return visible(", ".join([*names, *trial.modules_in_fp32]) or "nothing")
