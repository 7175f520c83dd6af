"""`localize` on a page: who is suspect, where errors enter, and what would mend them."""

from statistics import fmean

from markupsafe import Markup

from mismatch_probe.notation import ABSENT, Written, write_count, write_estimate, write_number
from mismatch_probe.records.localize import Localization, PlaceError, Side, Suspect
from mismatch_probe.report.figures.series import Marks, Series, draw
from mismatch_probe.report.findings.interventions import best_part, interventions
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.names import PairStyle, dtypes_label
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


def localize_key(found: Localization) -> str:
    """Part of an anchor."""
    return f"{found.settings.train_dtype}-{found.settings.infer_dtype}"


def localize_label(found: Localization) -> str:
    return dtypes_label(found.settings.train_dtype, found.settings.infer_dtype)


def localize_overview(found: Localization) -> Overview:
    return Overview(
        subject="localization of the mismatch",
        model=found.model,
        headline=localize_headline(found),
        badge=Badge("bug", "suspect found") if found.suspects else Badge("clean", "no suspect"),
        facts=[
            localize_label(found),
            f"{write_count(found.looked_into_tokens)} tokens in {write_count(found.looked_into_sequences)} of "
            f"{write_count(found.num_sequences)} responses",
            f"KL (k3) {write_estimate(found.kl_k3)}, mean |d| {write_estimate(found.mean_abs_diff)} nats",
        ],
        advice=best_part(found),
        table=_sides(found),
        footnote="Errors are root mean squares against FP32, relative to its output; own: what a block adds to what it "
        "was given. Brackets: intervals clustered by prompt.",
        contrasts=[] if found.first_difference is None else [f"The sides first differ at {found.first_difference}."],
        figure=_growth(found),
    )


def localize_sections(found: Localization) -> list[Section]:
    """What stands under the overview, in the order in which it is to be read."""
    key = localize_key(found)
    sections = [
        Section(
            f"suspects-{key}",
            "Who is suspect",
            "A place is suspect where, on the same input, one side errs in another way than rounding and than the "
            "other side.",
            _suspects(found),
        )
    ]
    if found.interventions is not None:
        sections.append(interventions(found.interventions, key))
    if found.routers:
        lede = "Share of tokens that go to another set of experts than in FP32: a decision that rounding can tip."
        sections.append(Section(f"routers-{key}", "Expert routing", lede, [routers_table(found)]))
    if found.modules:
        lede = "What each module adds on the same input, over all layers, under its name in both implementations."
        blocks: list[Block] = [modules_table(found)]
        if found.unmatched:
            blocks.append(Note("Modules of vLLM without a counterpart:", found.unmatched))
        sections.append(Section(f"modules-{key}", "Every module", lede, blocks))
    return sections


def localize_headline(found: Localization) -> str:
    if found.suspects:
        return " ".join(f"{layers_of(suspect)}{suspect.sentence}" for suspect in found.suspects)
    looked = "module" if found.modules else "block"
    return f"No {looked} stands out: on the same input both sides err everywhere as rounding does."


def layers_of(suspect: Suspect) -> str:
    layers = ", ".join(map(str, suspect.layers))
    return f"Layer{'s' if len(suspect.layers) > 1 else ''} {layers}: " if suspect.layers else ""


def _sides(found: Localization) -> Table:
    last = found.blocks[-1]
    rows: list[list[Cell]] = []
    for side, name in SIDES.items():
        error = getattr(last, side)
        dtype = found.settings.infer_dtype if side == "infer" else found.settings.train_dtype
        rows.append(
            [
                name,
                dtype.upper(),
                write_estimate(error.total),
                found.enters.get(side, ABSENT),
            ]
        )
    columns = ["side", "dtype", "error at the end", "most enters at"]
    return Table("One row a side", columns, rows, text_columns=frozenset({1, 3}), stacked=True)


def _growth(found: Localization) -> Figure:
    key = localize_key(found)
    marks = Marks(places=sorted({layer for suspect in found.suspects for layer in suspect.layers}))
    panels = [
        _errors(
            found,
            marks,
            "total",
            Heading(
                f"plot-total-{key}",
                "How the error grows: behind each block",
                _range_of(found, "total"),
                "The residual stream behind each block against FP32's. Rounding makes it grow slowly and alike on both "
                "sides.",
            ),
        ),
        _errors(
            found,
            marks,
            "own",
            Heading(
                f"plot-own-{key}",
                "Where it enters: what each block adds",
                _range_of(found, "own"),
                "Against FP32 on what this side itself was given. A block far above its neighbours, on one side, "
                "computes something else.",
            ),
        ),
    ]
    suspects = " Dashed upright lines are the layers of suspects." if marks.places else ""
    return Figure(
        f"figure-growth-{key}",
        f"How to read it: lower is closer to FP32; bands are intervals clustered by prompt.{suspects}",
        panels,
        [blocks_table(found)],
        key=[(name, STYLES[side]) for side, name in SIDES.items()],
    )


def _errors(found: Localization, marks: Marks, what: str, heading: Heading) -> Panel:
    layers = [number if block.layer is None else block.layer for number, block in enumerate(found.blocks)]
    series = []
    for side, style in STYLES.items():
        estimates = [getattr(getattr(block, side), what) for block in found.blocks]
        low, high = ([getattr(one, end) for one in estimates] for end in ("low", "high"))
        series.append(Series(layers, [one.value for one in estimates], style, low, high))
    return draw(heading, series, "layer", "relative error", marks=marks)


def _range_of(found: Localization, what: str) -> str:
    first, last = found.blocks[0], found.blocks[-1]
    return "; ".join(
        f"{name} {write_number(getattr(getattr(first, side), what).value)} at the first block, "
        f"{write_number(getattr(getattr(last, side), what).value)} at the last"
        for side, name in SIDES.items()
    )


def blocks_table(found: Localization) -> Table:
    rows: list[list[Cell]] = [
        [
            block.train_name,
            *(write_estimate(one) for side in (block.infer, block.train) for one in (side.total, side.own)),
            write_number(block.between),
        ]
        for block in found.blocks
    ]
    columns = ["block", "engine", "engine, own", "training", "training, own", "between"]
    return Table("Relative error at each block", columns, rows, stacked=True)


def _suspects(found: Localization) -> list[Block]:
    if not found.suspects:
        return [Note("Nobody: the two sides' own errors are those of rounding at every place that was looked at.")]
    return [
        Finding(
            f"suspect-{localize_key(found)}-{number}",
            f"{layers_of(suspect)}{suspect.place}",
            Badge("bug", SIDES[suspect.side]),
            suspect.sentence,
            [
                (title, [Markup("<code>{}</code>").format(visible(name)) for name in names])
                for title, names in (("In the training path", suspect.train_names), ("In vLLM", suspect.infer_names))
                if names
            ],
        )
        for number, suspect in enumerate(found.suspects, start=1)
    ]


def routers_table(found: Localization) -> Table:
    rows: list[list[Cell]] = [
        [write_count(one.layer), *(write_estimate(share) for share in (one.infer, one.train, one.sides))]
        for one in found.routers
    ]
    columns = ["layer", "engine", "training path", "between the sides"]
    return Table("Tokens with other experts, as a share", columns, rows, stacked=True)


def modules_table(found: Localization) -> Table:
    places: dict[str, list[PlaceError]] = {}
    for one in found.modules:
        places.setdefault(one.place, []).append(one)
    rows: list[list[Cell]] = [
        [
            Markup("<code>{}</code>").format(visible(place)),
            write_count(len(same)),
            *(Written(write_number(fmean(getattr(one, side).own.value for one in same))) for side in SIDES),
            f"{max(one.own_ratio for one in same):.3g}",
            same[0].infer_name or "none",
        ]
        for place, same in places.items()
    ]
    columns = ["place", "layers", "engine, own", "training, own", "ratio at most", "name in vLLM"]
    return Table("Own error of each place, mean over layers", columns, rows, text_columns=frozenset({5}), stacked=True)
