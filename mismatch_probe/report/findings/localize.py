"""`localize` on a page: who is suspect, where errors enter, and what would mend them."""

import re
from statistics import fmean

from markupsafe import Markup

from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import ABSENT, Written, write_count, write_estimate, write_many, write_number
from mismatch_probe.records.findings import Localization, PlaceError, Side, Suspect
from mismatch_probe.report.figures.limits import Marks, Series, draw
from mismatch_probe.report.findings.interventions import best_part, interventions, localize_tiles
from mismatch_probe.report.names import PairStyle, visible
from mismatch_probe.report.view import (
    Badge,
    Block,
    Cell,
    Figure,
    Finding,
    Heading,
    Note,
    Overview,
    Panel,
    Section,
    Table,
)

SIDES: dict[Side, str] = {"infer": "engine", "train": "training path"}
STYLES: dict[Side, PairStyle] = {"infer": PairStyle("truncate", (), "o"), "train": PairStyle("mask", (6, 2), "s")}


def localize_key(localization: Localization) -> str:
    """Part of an anchor."""
    return "-".join(localization.settings.names)


def localize_label(localization: Localization) -> str:
    return sides_label(*localization.settings.names)


def localize_overview(localization: Localization) -> Overview:
    return Overview(
        subject="localization of the mismatch",
        model=localization.model,
        headline=localize_headline(localization),
        tiles=localize_tiles(localization),
        badge=Badge("bug", "suspect found") if localization.suspects else Badge("clean", "no suspect"),
        facts=[
            localize_label(localization),
            f"{write_many(localization.looked_into_tokens, 'token')} in "
            f"{write_count(localization.looked_into_sequences)} of "
            f"{write_many(localization.num_sequences, 'response')}",
            f"mean |d| {write_estimate(localization.mean_abs_diff)} nats",
        ],
        advice=best_part(localization),
        table=_sides(localization),
        footnote="Errors are root mean squares over tokens, each relative to its FP32 output; own: what a block adds "
        "to what it was given. Brackets: intervals clustered by prompt.",
        contrasts=[],
        figure=_growth(localization),
    )


def localize_sections(localization: Localization) -> list[Section]:
    """What stands under the overview, in the order in which it is to be read."""
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


def localize_headline(localization: Localization) -> str:
    if localization.suspects:
        return " ".join(f"{layers_of(suspect)}{suspect.sentence}" for suspect in localization.suspects)
    looked = "module" if localization.modules else "block"
    return f"No {looked} stands out: on the same input both sides err everywhere as rounding does."


def layers_of(suspect: Suspect) -> str:
    layers = ", ".join(map(str, suspect.layers))
    return f"Layer{'s' if len(suspect.layers) > 1 else ''} {layers}: " if suspect.layers else ""


def _sides(localization: Localization) -> Table:
    last = localization.blocks[-1]
    rows: list[list[Cell]] = []
    for side, name in SIDES.items():
        error = getattr(last, side)
        dtype = localization.settings.infer_dtype if side == "infer" else localization.settings.train_dtype
        rows.append(
            [
                name,
                dtype.upper(),
                write_estimate(error.total),
                localization.enters.get(side, ABSENT),
            ]
        )
    columns = ["side", "dtype", "error at the end", "most enters at"]
    return Table("One row a side", columns, rows, text_columns=frozenset({1, 3}), stacked=True)


def _growth(localization: Localization) -> Figure:
    key = localize_key(localization)
    marks = Marks(places=sorted({layer for suspect in localization.suspects for layer in suspect.layers}))
    panels = [
        _errors(
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
        _errors(
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
        [blocks_table(localization)],
        key=[(name, STYLES[side]) for side, name in SIDES.items()],
    )


def _errors(localization: Localization, marks: Marks, what: str, heading: Heading) -> Panel:
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


def blocks_table(localization: Localization) -> Table:
    rows: list[list[Cell]] = [
        [
            block.train_name,
            *(write_estimate(error) for side in (block.infer, block.train) for error in (side.total, side.own)),
            write_number(block.between),
        ]
        for block in localization.blocks
    ]
    columns = ["block", "engine", "engine, own", "training", "training, own", "between"]
    return Table("Relative error at each block", columns, rows, stacked=True)


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
    rows: list[list[Cell]] = [
        [write_count(router.layer), *(write_estimate(share) for share in (router.infer, router.train, router.sides))]
        for router in localization.routers
    ]
    columns = ["layer", "engine", "training path", "between the sides"]
    return Table("Tokens with other experts, as a share", columns, rows, stacked=True)


def modules_table(localization: Localization) -> Table:
    places: dict[str, list[PlaceError]] = {}
    for module in localization.modules:
        places.setdefault(module.place, []).append(module)
    rows: list[list[Cell]] = [
        [
            Markup("<code>{}</code>").format(visible(place)),
            write_count(len(same)),
            *(Written(write_number(fmean(getattr(error, side).own.value for error in same))) for side in SIDES),
            f"{max(error.own_ratio for error in same):.3g}",
            _within_its_layer(same[0]),
        ]
        for place, same in places.items()
    ]
    columns = ["place", "layers", "engine, own", "training, own", "ratio at most", "name in vLLM"]
    return Table("Own error of each place, mean over layers", columns, rows, text_columns=frozenset({5}), stacked=True)


def _within_its_layer(error: PlaceError) -> str:
    """The engine's name of a place, without the path of the layer that a row of several layers does not speak of."""
    name = error.infer_name or "none"
    return re.sub(r"^.*?\.\d+\.(?=.)", "", name) if error.layer is not None else name
