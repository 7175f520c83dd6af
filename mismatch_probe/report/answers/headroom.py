"""`headroom`: the verdict, weights, activations of each layer against FP16's limit, gradients."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from markupsafe import Markup

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import (
    ABSENT,
    WrittenNumber,
    with_powers,
    write_count,
    write_error,
    write_many,
    write_number,
    write_share,
)
from mismatch_probe.records.examinations import (
    ActivationFindings,
    GradientFindings,
    Headroom,
    LayerRange,
    OperationRange,
    PrecisionTrial,
    WeightRange,
    leaves_gradient,
)
from mismatch_probe.report.figures.limits import Marks, Series, draw
from mismatch_probe.report.names import PairStyle, visible
from mismatch_probe.report.sections.gradients import (
    GRADIENT_STYLES,
    fitting_scales,
    gradients,
    underflow_panel,
    underflow_table,
)
from mismatch_probe.report.view import (
    Answer,
    Badge,
    Block,
    Cell,
    Column,
    Figure,
    Heading,
    Lines,
    Note,
    Panel,
    Section,
    Table,
    Tile,
)

_MOST_TENSORS: Final = 12
_MOST_LAYERS: Final = 12
"""Of a screen."""

_BADGES = {
    HeadroomCode.FITS: Badge("clean", "fits"),
    HeadroomCode.FITS_WITH_LOSS_SCALE: Badge("clean", "fits with a loss scale"),
    HeadroomCode.FITS_EXCEPT: Badge("precision", "fits except some modules"),
    HeadroomCode.GRADIENTS_NOT_MEASURED: Badge("undecided", "gradients not measured"),
    HeadroomCode.DOES_NOT_FIT: Badge("bug", "does not fit"),
}
_LINES = {
    "residual stream": PairStyle("fp16", (), "o"),
    "product inside the MLP": PairStyle("bf16", (6, 2), "s"),
    "query times key, before the scale": PairStyle("fp64", (1.5, 1.5), "^"),
}
_KEPT = {"fp16": "FP16", "fp32": "FP32", "kernel": "inside a kernel, FP32"}


def headroom_answer(headroom: Headroom) -> Answer:
    return Answer(
        subject="headroom",
        model=headroom.model,
        headline=with_powers(headroom.verdict.sentence),
        tiles=_headroom_tiles(headroom),
        badge=_BADGES[headroom.verdict.code],
        facts=_headroom_facts(headroom),
        advice=[with_powers(advice) for advice in headroom.verdict.advice],
        table=_headroom_table(headroom),
        footnote="Bits left: how often a magnitude can double before it passes 65,504, FP16's largest number.",
        figure=_headroom_figure(headroom),
        sections=_headroom_sections(headroom),
        screen=_headroom_screen(headroom),
    )


def _headroom_tiles(headroom: Headroom) -> list[Tile]:
    """Room of the activations, error against BF16's, loss scales; none where nothing was run."""
    activations, plain, bf16 = headroom.activations, headroom.plain, headroom.bf16
    if activations is None or not activations.tightest or plain is None or bf16 is None:
        return []
    tightest = activations.tightest[0]
    place = f"{tightest.module or 'the model'} ({tightest.operation})"
    tiles = [
        Tile("Room before FP16 overflows", _room(tightest.margin_bits), f"at {place}"),
        Tile("Loss scales that fit", fitting_scales(plain, bf16), "what small gradients are multiplied by"),
    ]
    errors = plain.logprob_error_nats, bf16.logprob_error_nats
    if all(errors):
        fp16, other = (error for error in errors if error)
        note = f"{write_number(fp16)} against {write_number(other)} nats, rms"
        tiles.insert(1, Tile("Error of log-probs, FP16 to BF16", f"{write_number(fp16 / other)} times", note))
    return tiles


def _room(margin_bits: float | None) -> str:
    return "none" if margin_bits is None else f"{margin_bits:.1f} bits"


def _headroom_sections(headroom: Headroom) -> list[Section]:
    """In the order in which they are to be read."""
    evidence = Note("Seen, each in a run that was made:", _evidence(headroom))
    sections = [Section("headroom-evidence", "What shows it", "", [evidence]), _weights_section(headroom)]
    if headroom.activations is not None:
        sections.append(_activations(headroom.activations))
    if headroom.gradients is not None and headroom.plain is not None and headroom.bf16 is not None:
        sections.append(gradients(headroom.gradients, headroom.plain, headroom.bf16))
        sections.append(_trial_section(headroom, headroom.plain, headroom.bf16))
    return sections


def _headroom_screen(headroom: Headroom) -> list[Table | Lines]:
    """What shows it, the layers nearest to the limit, and the loss scales."""
    blocks: list[Table | Lines] = [Lines(_evidence(headroom))]
    if headroom.activations is not None:
        blocks.append(layers_table(_nearest(headroom.activations.layers)))
    trial = next((trial for trial in (headroom.plain, headroom.advised) if trial is not None and trial.scales), None)
    if trial is not None and headroom.gradients is not None:
        blocks.append(_scales(headroom.gradients, trial, headroom.bf16))
    if headroom.sampled_by is not None:
        rests_on = f"responses sampled by {headroom.sampled_by}; device {headroom.device}"
        blocks.append(Lines([rests_on], "dim", follows=True))
    return blocks


def _evidence(headroom: Headroom) -> list[str]:
    return [with_powers(line) for line in headroom.verdict.evidence]


def _nearest(layers: list[LayerRange]) -> list[LayerRange]:
    """The layers with the least room, in the model's order."""
    nearest = sorted(layers, key=lambda layer: float("-inf") if layer.margin_bits is None else layer.margin_bits)
    names = {layer.layer for layer in nearest[:_MOST_LAYERS]}
    return [layer for layer in layers if layer.layer in names]


def _scales(gradients: GradientFindings, trial: PrecisionTrial, bf16: PrecisionTrial | None) -> Table:
    """Every other loss scale that was tried, and those between which FP16 fits."""
    ends = (trial.from_exponent, trial.to_exponent)
    exponents = {scale.exponent for scale in trial.scales if not scale.exponent % 2 or scale.exponent in ends}
    underflow = [underflow for underflow in gradients.underflow if underflow.exponent in exponents]
    fp32_words = f", with {trial.parts_in_fp32} in FP32" if trial.modules_in_fp32 or trial.residual_in_fp32_from else ""
    table = underflow_table(gradients.model_copy(update={"underflow": underflow}), trial, bf16)
    return replace(table, caption=f"{table.caption}{fp32_words}")


def _headroom_facts(headroom: Headroom) -> list[str]:
    if headroom.activations is None:
        return [f"{write_count(headroom.weights.total.num_values)} weights; nothing was run"]
    responses, tokens = headroom.activations.num_sequences, headroom.activations.num_tokens
    return [
        f"{write_count(headroom.weights.total.num_values)} weights",
        f"{write_many(tokens, 'token')} of {write_many(responses, 'response')} and their prompts, sampled by "
        f"{headroom.sampled_by}",
        f"device {headroom.device}",
    ]


def _headroom_table(headroom: Headroom) -> Table:
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
            ["loss scales that fit", fitting_scales(headroom.plain, headroom.bf16), ABSENT],
        ]
    return Table("What was seen", ["", "FP16", "where, or BF16"], rows, text_columns=frozenset({2}), is_stacked=True)


def _magnitude(value: float | None) -> Cell:
    if not value:
        return "not finite" if value is None else "0"
    bits = math.log2(Dtype.FP16.largest / value)
    return WrittenNumber(write_number(value), f"{abs(bits):.1f} bits {'left' if bits >= 0 else 'too large'}")


def _versus(errors: Sequence[float | None]) -> list[Cell]:
    fp16, bf16 = map(write_error, errors)
    return [fp16, f"BF16: {bf16}"]


def _place(operation: OperationRange) -> Markup:
    return Markup("<code>{}</code> ({})").format(visible(operation.module or "the model"), visible(operation.operation))


def _on_the_right(headroom: Headroom) -> str:
    """How to read the loss scales."""
    if headroom.plain is None or headroom.bf16 is None or not leaves_gradient(headroom.plain, headroom.bf16):
        return "Whether a loss scale fits was not measured, since the responses leave next to no gradient."
    what = "no loss scale" if headroom.plain.from_exponent is None else "the shaded loss scales"
    return f"On the right {what} fitted in a true run."


def _headroom_figure(headroom: Headroom) -> Figure | None:
    if headroom.activations is None or headroom.gradients is None:
        return None
    return Figure(
        "figure-headroom",
        "How to read it: on the left every point has to stay below the dotted line, and each factor of 2 below it is a "
        f"bit of room. {_on_the_right(headroom)}",
        [
            _layers_panel(headroom.activations.layers),
            underflow_panel(headroom.gradients, headroom.plain, headroom.bf16),
        ],
        [layers_table(headroom.activations.layers), underflow_table(headroom.gradients, headroom.plain, headroom.bf16)],
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
    columns: list[Column[LayerRange]] = [
        Column("layer", lambda layer: layer.layer),
        Column("residual", lambda layer: write_number(layer.residual)),
        Column("bits left", lambda layer: ABSENT if layer.margin_bits is None else f"{layer.margin_bits:.1f}"),
        Column("MLP product", lambda layer: write_number(layer.mlp_product)),
        Column("query times key", lambda layer: write_number(layer.attention_scores)),
        Column("into softmax", lambda layer: write_number(layer.attention_logits)),
        Column("outlier ratio", lambda layer: write_number(layer.outlier_ratio)),
        Column(
            "its channel", lambda layer: ABSENT if layer.outlier_channel is None else write_count(layer.outlier_channel)
        ),
    ]
    return Table.of("Largest magnitudes in FP32", layers, columns, is_stacked=True)


def _weights_section(headroom: Headroom) -> Section:
    columns: list[Column[WeightRange]] = [
        Column("tensor", lambda tensor: visible(tensor.tensor)),
        Column("largest", lambda tensor: _magnitude(tensor.largest)),
        Column("overflow", lambda tensor: _share_of_values(tensor.num_overflowed, tensor)),
        Column("subnormal", lambda tensor: _share_of_values(tensor.num_subnormal, tensor)),
        Column("become zero", lambda tensor: _share_of_values(tensor.num_flushed, tensor)),
        Column("relative error", lambda tensor: write_number(tensor.relative_error)),
        Column("stored as", lambda tensor: tensor.stored_as, is_text=True),
    ]
    tensors = [headroom.weights.total, *headroom.weights.worst[:_MOST_TENSORS]]
    return Section(
        "headroom-weights",
        "Weights",
        f"Every one of {write_count(headroom.weights.num_tensors)} tensors was rounded to FP16; "
        "those that lose most are listed.",
        [Table.of("What rounding to FP16 does", tensors, columns)],
    )


def _share_of_values(count: int, tensor: WeightRange) -> str:
    return write_share(count, tensor.num_values) if count else "0"


def _activations(activations: ActivationFindings) -> Section:
    blocks: list[Block] = [_operations("The results with the least room", activations.tightest)]
    if activations.too_small:
        blocks.append(_operations("Results too small for FP16 to hold as well as BF16 does", activations.too_small))
    lede = "Every operation of the model's own code, by module; what it was in FP32, and how FP16 keeps it."
    return Section("headroom-activations", "Activations", lede, blocks)


def _operations(caption: str, operations: Sequence[OperationRange]) -> Table:
    finite = {True: "yes", False: "no", None: ABSENT}
    columns: list[Column[OperationRange]] = [
        Column("operation", _place),
        Column("largest", lambda operation: _magnitude(operation.largest)),
        Column(
            "rounding error",
            lambda operation: "n/a" if operation.relative_error is None else write_number(operation.relative_error),
        ),
        Column("kept in", lambda operation: _KEPT[operation.held_as], is_text=True),
        Column("finite in FP16", lambda operation: finite[operation.finite_in_fp16], is_text=True),
    ]
    return Table.of(caption, operations, columns, is_stacked=True)


def _trial_section(headroom: Headroom, plain: PrecisionTrial, bf16: PrecisionTrial) -> Section:
    columns: list[Column[tuple[str, PrecisionTrial]]] = [
        Column("run", lambda row: row[0]),
        Column("in FP32", lambda row: _modules_in_fp32(row[1]), is_text=True),
        Column("finite", lambda row: _finite(row[1]), is_text=True),
        Column("log-prob error", lambda row: write_error(row[1].logprob_error_nats)),
        Column("gradient error", lambda row: write_error(row[1].gradient_error)),
        Column("scales that fit", lambda row: ABSENT if row[1] is bf16 else fitting_scales(row[1], bf16)),
    ]
    advised_runs = [] if headroom.advised is None else [("FP16 as advised", headroom.advised)]
    runs = [("BF16", bf16), ("FP16", plain), *advised_runs]
    return Section(
        "headroom-tried",
        "What was tried",
        "BF16 is the yardstick: FP16 fits where everything is finite and no further from FP32 than BF16 is.",
        [Table.of("True runs in 16 bits", runs, columns, is_stacked=True)],
    )


def _finite(trial: PrecisionTrial) -> Cell:
    return "yes" if trial.first_nonfinite is None else visible(f"no: {trial.first_nonfinite}")


def _modules_in_fp32(trial: PrecisionTrial) -> Markup:
    names = [f"residual stream from {trial.residual_in_fp32_from} on"] if trial.residual_in_fp32_from else []
    return visible(", ".join([*names, *trial.modules_in_fp32]) or "nothing")
