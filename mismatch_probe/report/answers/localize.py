"""`localize`: who is suspect, where errors enter, and what would fix them."""

import re
from collections.abc import Callable
from statistics import fmean

from markupsafe import Markup

from mismatch_probe.config.model import PairSide
from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import (
    ABSENT,
    WrittenNumber,
    write_count,
    write_estimate,
    write_many,
    write_number,
    write_size,
)
from mismatch_probe.records.findings import Localization, PlaceError, RouterDecisions, SideError, Suspect
from mismatch_probe.report.figures.limits import Marks, Series, draw
from mismatch_probe.report.names import PairStyle, visible
from mismatch_probe.report.sections.interventions import (
    best_part,
    interventions,
    surely_best,
    together_sentence,
    tried_table,
    whose,
    write_removed,
)
from mismatch_probe.report.view import (
    Answer,
    Badge,
    Block,
    Cell,
    Column,
    Figure,
    Finding,
    Heading,
    Lines,
    Note,
    Panel,
    Section,
    Table,
    Tile,
)
from mismatch_probe.stats.results import Estimate

SIDES: dict[PairSide, str] = {"infer": "engine", "train": "training path"}
STYLES: dict[PairSide, PairStyle] = {"infer": PairStyle("truncate", (), "o"), "train": PairStyle("mask", (6, 2), "s")}


_MOST_BLOCKS = 40
_BAR = 9
"""Of a screen: blocks, and characters of the longest bar."""


def localize_key(localization: Localization) -> str:
    """Part of an anchor."""
    return "-".join(localization.settings.names)


def localize_label(localization: Localization) -> str:
    return sides_label(*localization.settings.names)


def localize_answer(localization: Localization) -> Answer:
    return Answer(
        subject="localization of the mismatch",
        model=localization.model,
        headline=_headline(localization),
        tiles=_localize_tiles(localization),
        badge=Badge("bug", "suspect found") if localization.suspects else Badge("clean", "no suspect"),
        facts=[
            localize_label(localization),
            f"{write_many(localization.looked_into_tokens, 'token')} in "
            f"{write_count(localization.looked_into_sequences)} of "
            f"{write_many(localization.num_sequences, 'response')}",
            f"mean |d| {write_estimate(localization.mean_abs_diff)} nats",
        ],
        advice=best_part(localization),
        table=_table_of_sides(localization),
        footnote="Errors are root mean squares over tokens, each relative to its FP32 output; own: what a block adds "
        "to what it was given. Brackets: intervals clustered by prompt.",
        figure=_growth_figure(localization),
        sections=_localize_sections(localization),
        screen=_localize_screen(localization),
    )


def _localize_tiles(localization: Localization) -> list[Tile]:
    """How large the mismatch is, what fixes most of it, and where it begins."""
    kl = write_estimate(localization.kl_k3)
    tiles = [Tile("KL per token", kl.value, f"{kl.interval} nats, on the responses that were looked into")]
    best = surely_best(localization)
    if best is not None:
        note = f"of the KL, by {best.part} in higher precision on {whose(best)}"
        tiles.append(Tile("What fixes most", write_removed(best.removed), note))
    elif localization.interventions is not None:
        tiles.append(Tile("What fixes most", "nothing for sure", "every interval of what a part removes holds 0"))
    if localization.first_difference is not None:
        inside, _, module = localization.first_difference.rpartition(".")
        tiles.append(Tile("The sides first differ at", module, f"in {inside or 'the model'}, on the same input"))
    return tiles


def _localize_sections(localization: Localization) -> list[Section]:
    """In the order in which they are to be read."""
    key = localize_key(localization)
    sections = [
        Section(
            f"suspects-{key}",
            "Who is suspect",
            "A place is suspect where, on the same input, one side errs in another way than rounding and than the "
            "other side.",
            _suspects(localization),
        )
    ]
    if localization.interventions is not None:
        sections.append(interventions(localization.interventions, key))
    if localization.routers:
        lede = "Share of tokens that go to another set of experts than in FP32: a decision that rounding can tip."
        sections.append(Section(f"routers-{key}", "Expert routing", lede, [routers_table(localization)]))
    if localization.modules:
        lede = "What each module adds on the same input, over all layers, under its name in both implementations."
        blocks: list[Block] = [modules_table(localization)]
        if localization.unmatched:
            blocks.append(Note("Modules of vLLM without a counterpart:", localization.unmatched))
        sections.append(Section(f"modules-{key}", "Every module", lede, blocks))
    return sections


def _localize_screen(localization: Localization) -> list[Table | Lines]:
    """Where suspects are and errors enter, how these grow, and what would fix them."""
    blocks: list[Table | Lines] = [Lines(_place_lines(localization), follows=True), _with_bars(localization)]
    if localization.modules:
        blocks.append(modules_table(localization))
    trials = localization.interventions
    if trials is not None:
        left_out = [f"Not tried: {what}: {why}." for what, why in trials.left_out.items()]
        joint_sentences = [sentence for sentence in (together_sentence(trials),) if sentence]
        blocks += [tried_table(trials), Lines(joint_sentences, follows=True), Lines(left_out, "dim", follows=True)]
    if localization.routers:
        blocks.append(routers_table(localization))
    return [*blocks, Lines([_size_sentence_of(localization)], "dim", follows=True)]


def _place_lines(localization: Localization) -> list[str]:
    lines = []
    for suspect in localization.suspects:
        of_suspect = f" of {suspect.place}" if len(localization.suspects) > 1 else ""
        lines.append(f"  training path{of_suspect}: {', '.join(suspect.train_names)}")
        if suspect.infer_names:
            lines.append(f"  engine{of_suspect}: {', '.join(suspect.infer_names)}")
    kl, mean = write_estimate(localization.kl_k3), write_estimate(localization.mean_abs_diff)
    lines.append(f"Token KL (k3) {kl}, mean abs(d) {mean}")
    if localization.first_difference is None:
        lines.append("Both sides are the same bit for bit at every place that was looked at.")
    else:
        lines.append(f"The sides first differ at {localization.first_difference}.")
    entries = ", ".join(f"{side}: {name}" for side, name in localization.enters.items())
    return [*lines, f"Largest new error of a block: {entries}."]


def _size_sentence_of(localization: Localization) -> str:
    jobs = [f"{job} job at most {write_size(size)}" for job, size in localization.peak_memory_bytes.items()]
    return (
        f"{localization.looked_into_sequences} of {write_many(localization.num_sequences, 'response')} looked into, "
        f"{write_many(localization.looked_into_tokens, 'token')}; "
        f"{write_size(localization.stored_bytes)} of activations stored; {', '.join(jobs)}"
    )


def _with_bars(localization: Localization) -> Table:
    """Some of the blocks, evenly, without intervals, and a bar of the greater error."""
    largest = max((_growth_of_block(block) for block in localization.blocks), default=0.0)

    def bar(block: PlaceError) -> str:
        return "█" * max(1, round(_BAR * _growth_of_block(block) / largest)) if _growth_of_block(block) else ""

    columns = [*_block_columns(lambda estimate: write_estimate(estimate).value), Column("", bar)]
    blocks = localization.blocks
    return Table.of("Relative error at each block", blocks[:: -(-len(blocks) // _MOST_BLOCKS)], columns)


def _growth_of_block(block: PlaceError) -> float:
    return max(block.infer.total.value, block.train.total.value)


def _headline(localization: Localization) -> str:
    if localization.suspects:
        return " ".join(f"{layers_of(suspect)}{suspect.sentence}" for suspect in localization.suspects)
    unit = "module" if localization.modules else "block"
    return f"No {unit} stands out: on the same input both sides err everywhere as rounding does."


def layers_of(suspect: Suspect) -> str:
    layers = ", ".join(map(str, suspect.layers))
    return f"Layer{'s' if len(suspect.layers) > 1 else ''} {layers}: " if suspect.layers else ""


def _table_of_sides(localization: Localization) -> Table:
    last, settings = localization.blocks[-1], localization.settings
    dtypes = {"infer": settings.infer_dtype, "train": settings.train_dtype}
    errors = {"infer": last.infer, "train": last.train}
    columns: list[Column[PairSide]] = [
        Column("side", lambda side: SIDES[side]),
        Column("dtype", lambda side: dtypes[side].upper(), is_text=True),
        Column("error at the end", lambda side: write_estimate(errors[side].total)),
        Column("most enters at", lambda side: localization.enters.get(side, ABSENT), is_text=True),
    ]
    return Table.of("One row a side", SIDES, columns, is_stacked=True)


def _growth_figure(localization: Localization) -> Figure:
    key = localize_key(localization)
    marks = Marks(places=sorted({layer for suspect in localization.suspects for layer in suspect.layers}))
    panels = [
        _error_by_layer_panel(
            localization,
            marks,
            "total",
            Heading(
                f"plot-total-{key}",
                "How the error grows: behind each block",
                _range_of(localization, "total"),
                "The residual stream behind each block against FP32's. Rounding makes it grow slowly and alike on both "
                "sides.",
            ),
        ),
        _error_by_layer_panel(
            localization,
            marks,
            "own",
            Heading(
                f"plot-own-{key}",
                "Where it enters: what each block adds",
                _range_of(localization, "own"),
                "Against FP32 on what this side itself was given. A block far above its neighbours, on one side, "
                "computes something else.",
            ),
        ),
    ]
    suspects = " Dotted upright lines are the layers of suspects." if marks.places else ""
    return Figure(
        f"figure-growth-{key}",
        f"How to read it: lower is closer to FP32; bands are intervals clustered by prompt.{suspects}",
        panels,
        [_blocks_table(localization)],
        key=[(name, STYLES[side]) for side, name in SIDES.items()],
    )


def _error_by_layer_panel(localization: Localization, marks: Marks, what: str, heading: Heading) -> Panel:
    layers = [number if block.layer is None else block.layer for number, block in enumerate(localization.blocks)]
    series = []
    for side, style in STYLES.items():
        estimates = [getattr(getattr(block, side), what) for block in localization.blocks]
        low, high = ([getattr(estimate, end) for estimate in estimates] for end in ("low", "high"))
        series.append(Series(SIDES[side], layers, [estimate.value for estimate in estimates], style, low, high))
    return draw(heading, series, "layer", "relative error", marks=marks)


def _range_of(localization: Localization, what: str) -> str:
    first, last = localization.blocks[0], localization.blocks[-1]
    return "; ".join(
        f"{name} {write_number(getattr(getattr(first, side), what).value)} at the first block, "
        f"{write_number(getattr(getattr(last, side), what).value)} at the last"
        for side, name in SIDES.items()
    )


def _blocks_table(localization: Localization) -> Table:
    return Table.of(
        "Relative error at each block", localization.blocks, _block_columns(write_estimate), is_stacked=True
    )


def _block_columns(write: Callable[[Estimate], Cell]) -> list[Column[PlaceError]]:
    return [
        Column("block", lambda block: block.train_name),
        Column("engine", lambda block: write(block.infer.total)),
        Column("engine, own", lambda block: write(block.infer.own)),
        Column("training", lambda block: write(block.train.total)),
        Column("training, own", lambda block: write(block.train.own)),
        Column("between", lambda block: write_number(block.between)),
    ]


def _suspects(localization: Localization) -> list[Block]:
    if not localization.suspects:
        return [Note("No place: the two sides' own errors are those of rounding at every place that was looked at.")]
    return [
        Finding(
            f"suspect-{localize_key(localization)}-{number}",
            f"{layers_of(suspect)}{suspect.place}",
            Badge("bug", SIDES[suspect.side]),
            suspect.sentence,
            [
                (title, [Markup("<code>{}</code>").format(visible(name)) for name in names])
                for title, names in (("In the training path", suspect.train_names), ("In vLLM", suspect.infer_names))
                if names
            ],
        )
        for number, suspect in enumerate(localization.suspects, start=1)
    ]


def routers_table(localization: Localization) -> Table:
    columns: list[Column[RouterDecisions]] = [
        Column("layer", lambda router: write_count(router.layer)),
        Column("engine", lambda router: write_estimate(router.infer)),
        Column("training path", lambda router: write_estimate(router.train)),
        Column("between the sides", lambda router: write_estimate(router.sides)),
    ]
    return Table.of("Tokens with other experts, as a share", localization.routers, columns, is_stacked=True)


def modules_table(localization: Localization) -> Table:
    places: dict[str, list[PlaceError]] = {}
    for module in localization.modules:
        places.setdefault(module.place, []).append(module)
    columns: list[Column[list[PlaceError]]] = [
        Column("place", lambda same: Markup("<code>{}</code>").format(visible(same[0].place))),
        Column("layers", lambda same: write_count(len(same))),
        Column("engine, own", lambda same: _mean_own([module.infer for module in same])),
        Column("training, own", lambda same: _mean_own([module.train for module in same])),
        Column("ratio at most", lambda same: f"{max(module.own_ratio for module in same):.3g}"),
        Column("name in vLLM", lambda same: _within_its_layer(same[0]), is_text=True),
    ]
    return Table.of("Own error of each place, mean over layers", places.values(), columns, is_stacked=True)


def _mean_own(errors: list[SideError]) -> WrittenNumber:
    return WrittenNumber(write_number(fmean(error.own.value for error in errors)))


def _within_its_layer(error: PlaceError) -> str:
    """The engine's name of a place, without the path of the layer that a row of several layers does not speak of."""
    name = error.infer_name or "none"
    return re.sub(r"^.*?\.\d+\.(?=.)", "", name) if error.layer is not None else name
