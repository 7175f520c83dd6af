"""`headroom` on a page: the verdict, weights, activations of each layer against FP16's limit, gradients."""

import math
from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import ABSENT, Written, write_count, write_many, write_number, write_share
from mismatch_probe.records.headroom import (
    ActivationFindings,
    Headroom,
    LayerRange,
    OperationRange,
    Trial,
    WeightRange,
)
from mismatch_probe.report.figures.limits import Marks, Series, draw
from mismatch_probe.report.findings.gradients import (
    GRADIENT_STYLES,
    fitting_scales,
    gradients,
    underflow_panel,
    underflow_table,
    with_powers,
    write_error,
)
from mismatch_probe.report.findings.interventions import headroom_tiles
from mismatch_probe.report.names import PairStyle, visible
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


def headroom_overview(headroom: Headroom) -> Overview:
    return Overview(
        subject="headroom",
        model=headroom.model,
        headline=with_powers(headroom.verdict.sentence),
        tiles=headroom_tiles(headroom),
        badge=_BADGES[headroom.verdict.code],
        facts=_facts(headroom),
        advice=[with_powers(advice) for advice in headroom.verdict.advice],
        table=_table(headroom),
        footnote="Bits left: how often a magnitude can double before it passes 65,504, FP16's largest number.",
        contrasts=[],
        figure=_figure(headroom),
    )


def headroom_sections(headroom: Headroom) -> list[Section]:
    """What stands under the overview, in the order in which it is to be read."""
    evidence = Note("Seen, each in a run that was made:", [with_powers(line) for line in headroom.verdict.evidence])
    sections = [Section("headroom-evidence", "What shows it", "", [evidence]), _weights(headroom)]
    if headroom.activations is not None:
        sections.append(_activations(headroom.activations))
    if headroom.gradients is not None and headroom.plain is not None and headroom.bf16 is not None:
        sections.append(gradients(headroom.gradients, headroom.plain, headroom.bf16))
        sections.append(_tried(headroom, headroom.plain, headroom.bf16))
    return sections


def _facts(headroom: Headroom) -> list[str]:
    if headroom.activations is None:
        return [f"{write_count(headroom.weights.total.num_values)} weights; nothing was run"]
    responses, tokens = headroom.activations.num_sequences, headroom.activations.num_tokens
    return [
        f"{write_count(headroom.weights.total.num_values)} weights",
        f"{write_many(tokens, 'token')} in {write_many(responses, 'response')}, sampled by {headroom.sampled_by}",
        f"device {headroom.device}",
    ]


def _table(headroom: Headroom) -> Table:
    total = headroom.weights.total
    largest = next((tensor.tensor for tensor in headroom.weights.worst if tensor.largest == total.largest), ABSENT)
    rows: list[list[Cell]] = [["largest weight", _magnitude(total.largest), visible(largest)]]
    if headroom.activations is not None:
        rows += [
            ["largest result held in FP16", _magnitude(operation.largest), _place(operation)]
            for operation in headroom.activations.tightest[:1]
        ]
    if headroom.plain is not None and headroom.bf16 is not None:
        first, both = headroom.plain.first_nonfinite, (headroom.plain, headroom.bf16)
        rows += [
            ["every result finite", "yes" if first is None else "no", ABSENT if first is None else visible(first)],
            ["error of log-probs, rms nats", *_versus([trial.logprob_error_nats for trial in both])],
            ["error of the gradient", *_versus([trial.gradient_error for trial in both])],
            ["loss scales that fit", fitting_scales(headroom.plain), ABSENT],
        ]
    return Table("What was seen", ["", "FP16", "where, or BF16"], rows, text_columns=frozenset({2}), stacked=True)


def _magnitude(value: float | None) -> Cell:
    if not value:
        return "not finite" if value is None else "0"
    bits = math.log2(Dtype.FP16.largest / value)
    return Written(write_number(value), f"{abs(bits):.1f} bits {'left' if bits >= 0 else 'too large'}")


def _versus(errors: Sequence[float | None]) -> list[Cell]:
    fp16, bf16 = map(write_error, errors)
    return [fp16, f"BF16: {bf16}"]


def _place(operation: OperationRange) -> Markup:
    return Markup("<code>{}</code> ({})").format(visible(operation.module or "the model"), visible(operation.operation))


def _figure(headroom: Headroom) -> Figure | None:
    if headroom.activations is None or headroom.gradients is None:
        return None
    fitting = headroom.plain is not None and headroom.plain.from_exponent is not None
    return Figure(
        "figure-headroom",
        "How to read it: on the left every point has to stay below the dotted line, and each factor of 2 below it is a "
        f"bit of room. On the right {'the shaded loss scales' if fitting else 'no loss scale'} fitted in a true run.",
        [_layers_panel(headroom.activations.layers), underflow_panel(headroom.gradients, headroom.plain)],
        [layers_table(headroom.activations.layers), underflow_table(headroom.gradients, headroom.plain)],
        key=[*_LINES.items(), *GRADIENT_STYLES.items()],
    )


def _layers_panel(layers: Sequence[LayerRange]) -> Panel:
    places = list(range(len(layers)))
    curves = [[getattr(layer, name) for layer in layers] for name in ("residual", "mlp_product", "attention_scores")]
    largest = [max((value for value in values if value is not None), default=0.0) for values in curves]
    heading = Heading(
        "plot-headroom-layers",
        "Largest magnitudes in each layer",
        "; ".join(f"{name} up to {write_number(value)}" for name, value in zip(_LINES, largest, strict=True)),
        "In FP32, over prompts and responses.",
    )
    return draw(
        heading,
        [Series(name, places, values, style) for values, (name, style) in zip(curves, _LINES.items(), strict=True)],
        "layer",
        "largest magnitude",
        marks=Marks(limit=(Dtype.FP16.largest, "65,504: FP16 ends here")),
    )


def layers_table(layers: Sequence[LayerRange]) -> Table:
    rows: list[list[Cell]] = [
        [
            layer.layer,
            write_number(layer.residual),
            ABSENT if layer.margin_bits is None else f"{layer.margin_bits:.1f}",
            write_number(layer.mlp_product),
            write_number(layer.attention_scores),
            write_number(layer.attention_logits),
            write_number(layer.outlier_ratio),
            ABSENT if layer.outlier_channel is None else write_count(layer.outlier_channel),
        ]
        for layer in layers
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


def _weights(headroom: Headroom) -> Section:
    total = headroom.weights.total
    rows = [_weight_row(tensor) for tensor in (total, *headroom.weights.worst[:_MOST_TENSORS])]
    columns = ["tensor", "largest", "overflow", "subnormal", "become zero", "relative error", "stored as"]
    return Section(
        "headroom-weights",
        "Weights",
        f"Every one of {write_count(headroom.weights.num_tensors)} tensors was rounded to FP16; "
        "those that lose most are listed.",
        [Table("What rounding to FP16 does", columns, rows, text_columns=frozenset({6}))],
    )


def _weight_row(tensor: WeightRange) -> list[Cell]:
    shares = (tensor.num_overflowed, tensor.num_subnormal, tensor.num_flushed)
    return [
        visible(tensor.tensor),
        _magnitude(tensor.largest),
        *(write_share(count, tensor.num_values) if count else "0" for count in shares),
        write_number(tensor.relative_error),
        tensor.stored_as,
    ]


def _activations(activations: ActivationFindings) -> Section:
    blocks: list[Block] = [_operations("The results with the least room", activations.tightest)]
    if activations.too_small:
        blocks.append(_operations("Results too small for FP16 to hold as well as BF16 does", activations.too_small))
    lede = "Every operation of the model's own code, by module; what it was in FP32, and how FP16 keeps it."
    return Section("headroom-activations", "Activations", lede, blocks)


def _operations(caption: str, operations: Sequence[OperationRange]) -> Table:
    rows: list[list[Cell]] = [
        [
            _place(operation),
            _magnitude(operation.largest),
            "n/a" if operation.relative_error is None else write_number(operation.relative_error),
            _KEPT[operation.held_as],
            {True: "yes", False: "no", None: ABSENT}[operation.finite_in_fp16],
        ]
        for operation in operations
    ]
    columns = ["operation", "largest", "rounding error", "kept in", "finite in FP16"]
    return Table(caption, columns, rows, text_columns=frozenset({3, 4}), stacked=True)


def _tried(headroom: Headroom, plain: Trial, bf16: Trial) -> Section:
    advised = [] if headroom.advised is None else [("FP16 as advised", headroom.advised)]
    rows: list[list[Cell]] = [
        [
            name,
            _raised(trial),
            "yes" if trial.first_nonfinite is None else visible(f"no: {trial.first_nonfinite}"),
            write_error(trial.logprob_error_nats),
            write_error(trial.gradient_error),
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


def _raised(trial: Trial) -> Markup:
    names = [f"residual stream from {trial.residual_in_fp32_from} on"] if trial.residual_in_fp32_from else []
    return visible(", ".join([*names, *trial.modules_in_fp32]) or "nothing")
