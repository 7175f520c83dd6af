"""What a page is made of: sections of tables, figures and notes, and what could not be had."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from markupsafe import Markup

from mismatch_probe.notation import ABSENT, Written
from mismatch_probe.records.summary import Verdict
from mismatch_probe.report.names import PairStyle, listed, verdict_words


@dataclass(frozen=True)
class Badge:
    """A judgement in a word or two; `kind` is one of `names.SIGNS` and picks its sign and tone."""

    kind: str
    words: str

    @classmethod
    def of(cls, verdict: Verdict) -> "Badge":
        return cls(verdict.kind, verdict_words(verdict))


Cell = str | Markup | Written | Badge


@dataclass(frozen=True)
class Table:
    """`rows` are as wide as `columns`, and the first cell of a row is its header.

    `reading` tells under the caption how to read it; `text_columns` are set flush left; `folded` tables open on
    request; `stacked` tables turn each row into a card on a narrow screen. `row_anchors` name the rows, where given.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    text_columns: frozenset[int] = frozenset()
    reading: str = ""
    folded: bool = False
    stacked: bool = False
    anchor: str = ""
    row_anchors: Sequence[str] = ()


@dataclass(frozen=True)
class Heading:
    """Names a drawing: `description` is what a screen reader says for it, `reading` tells everyone how to read it,
    `log_reading` how to read its axes while they are logarithmic.
    """

    anchor: str
    title: str
    description: str
    reading: str = ""
    log_reading: str = ""


@dataclass(frozen=True)
class Panel:
    """One drawing under its heading: plotly's `data` and `layout`, and the height in pixels."""

    heading: Heading
    specification: dict[str, Any]
    height: int

    @property
    def shows_something(self) -> bool:
        return bool(self.specification["data"])

    @property
    def is_logarithmic(self) -> bool:
        layout = self.specification["layout"]
        return any(layout.get(axis, {}).get("type") == "log" for axis in ("xaxis", "yaxis"))


@dataclass(frozen=True)
class Figure:
    """Panels that share a key, a caption that tells how to read them, and the numbers behind them.

    `dense` panels stand three in a row on a wide screen, others two; a single panel has its caption beside it. A panel
    that shows nothing is left out, and named in a sentence. `tables` open on request, together.
    """

    anchor: str
    caption: str
    panels: Sequence[Panel]
    tables: Sequence[Table]
    key: Sequence[tuple[str, PairStyle]] = ()
    dense: bool = False

    @property
    def drawn(self) -> list[Panel]:
        return [panel for panel in self.panels if panel.shows_something]

    @property
    def left_out(self) -> str:
        """Which panels are left out and why; empty where none is."""
        titles = [f"“{panel.heading.title}”" for panel in self.panels if not panel.shows_something]
        return f"Left out, for too few responses or no deviation to draw: {listed(titles)}." if titles else ""


@dataclass(frozen=True)
class Note:
    """A sentence set apart, with a list under it: what could not be had and why."""

    text: str
    items: Sequence[str] = ()


@dataclass(frozen=True)
class Finding:
    """The verdict on one pair: its sentence, and lists under headings (evidence, where to look, advice); one that
    opens on request has its sentence in sight.
    """

    anchor: str
    label: str
    badge: Badge
    sentence: str
    lists: Sequence[tuple[str, Sequence[str | Markup]]]
    folded: bool = False


@dataclass(frozen=True)
class Command:
    """A command line to copy."""

    text: str


@dataclass(frozen=True)
class ColoredText:
    """A model's text, each token coloured by its deviation; `tokens` is HTML in which the text is inert.

    `log_mu` and `diff` are the numbers of the tokens, comma after comma, for the page's script to show; `first` is the
    number of the first token. `back` leads to what this text belongs to; `prompt` is the text that it answers.
    """

    anchor: str
    label: str
    tokens: Markup
    log_mu: str
    diff: str
    first: int
    prompt: str | None = None
    back: Sequence[tuple[str, str]] = ()
    is_open: bool = False


@dataclass(frozen=True)
class ColorScale:
    """Which colour stands for which deviation: the class of a token, and what it means."""

    steps: Sequence[tuple[str, str]]


Block = Figure | Table | Note | Finding | Command | ColoredText | ColorScale


@dataclass(frozen=True)
class Section:
    """`folded`: only the title is in sight at once."""

    anchor: str
    title: str
    lede: str
    blocks: Sequence[Block]
    folded: bool = False


@dataclass(frozen=True)
class Tile:
    """One large number or name, what it is above it and how to take it below."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Overview:
    """The top of a page: what it is about, the answer, what to do, one row a thing measured, perhaps a figure."""

    subject: str
    model: str
    headline: str
    badge: Badge
    facts: Sequence[str]
    advice: Sequence[str]
    table: Table
    footnote: str
    contrasts: Sequence[str]
    figure: Figure | None
    tiles: Sequence[Tile] = ()


_WORDS: Final = {
    "budget_tokens": "a fitted length budget",
    "budget_closed_form": "the closed form of the length budget",
    "drift_per_1000": "the drift of S",
    "error_correlation": "the correlation of the two errors",
    "rms_error_mu": "the engine's error",
    "rms_error_pi": "the training path's error",
    "share_pi": "the training path's share of the error",
    "spread_coefficient": "the spread",
    "spread_exponent": "its exponent",
}


def absences(of_pairs: Sequence[tuple[str, Mapping[str, str]]]) -> Note | None:
    """`of_pairs`: the label of each pair, and the reason by the name of what is absent; None where nothing is."""
    named: dict[tuple[str, str], list[str]] = {}
    for label, reasons in of_pairs:
        for reason in dict.fromkeys(reasons.values()):
            names = [_WORDS.get(name, name.replace("_", " ")) for name, why in reasons.items() if why == reason]
            named.setdefault((", ".join(names), reason), []).append(label)
    items = [f"{', '.join(labels)}: {names}, since {reason}" for (names, reason), labels in named.items()]
    return Note("What could not be had:", items) if items else None


def with_values(rows: Sequence[list[Cell]]) -> list[list[Cell]]:
    """The rows of a table, behind their names, that hold a value; why others hold none is said under it."""
    return [row for row in rows if any(cell != ABSENT and cell != Written(ABSENT) for cell in row[1:])]


Axis = Literal["x", "y"]
Properties = dict[str, Any]


@dataclass(frozen=True)
class Drawing:
    """Traces and layout in plotly's JSON, with plotly's names of their properties.

    Plotly's own objects check each property when it is set, which takes ten times as long; the tests have them check
    what is drawn.
    """

    traces: list[Properties] = field(default_factory=list)
    layout: Properties = field(default_factory=dict)

    def add_scatter(self, **properties: Any) -> None:
        self.traces.append({"type": "scatter", **properties})

    def add_bar(self, **properties: Any) -> None:
        self.traces.append({"type": "bar", **properties})

    def add_heatmap(self, **properties: Any) -> None:
        self.traces.append({"type": "heatmap", **properties})

    def add_annotation(self, **properties: Any) -> None:
        self.layout.setdefault("annotations", []).append(properties)

    def add_shape(self, kind: Literal["line", "rect"], axis: Axis, start: float, end: float, **properties: Any) -> None:
        """From `start` to `end` of an axis, over the whole of the other."""
        other = "y" if axis == "x" else "x"
        place = {f"{axis}0": start, f"{axis}1": end, f"{axis}ref": axis}
        across = {f"{other}0": 0, f"{other}1": 1, f"{other}ref": f"{other} domain"}
        self.layout.setdefault("shapes", []).append({"type": kind, **place, **across, **properties})

    def update_axis(self, axis: Axis, **properties: Any) -> None:
        self.layout.setdefault(f"{axis}axis", {}).update(properties)
