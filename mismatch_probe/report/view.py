"""What an answer is made of, on a screen and on a page: tables, figures, notes, sections; and what could not be had."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar

from markupsafe import Markup

from mismatch_probe.notation import ABSENT, WrittenNumber, join_names, write_fold
from mismatch_probe.records.summary import PairSummary, Verdict
from mismatch_probe.report.names import PairStyle, verdict_words
from mismatch_probe.verdict.headline import grows

_WORST_FIRST: Final = ("bug", "broken", "growing", "undecided", "precision", "clean")


@dataclass(frozen=True)
class Badge:
    """A judgement in a word or two; `kind` is one of `names.SIGNS` and picks its sign and tone."""

    kind: str
    words: str

    @classmethod
    def of(cls, verdict: Verdict) -> "Badge":
        return cls(verdict.kind, verdict_words(verdict))

    @classmethod
    def of_pair(cls, pair: PairSummary) -> "Badge":
        """That of its verdict, or that its KL grows over the steps of a log, which no calm colour may say."""
        if pair.growth is None or not grows(pair) or pair.verdict.kind == "bug":
            return cls.of(pair.verdict)
        times = "" if pair.growth.ratio is None else f" {write_fold(pair.growth.ratio.value)}"
        return cls("growing", f"KL grows{times}")

    @property
    def rank(self) -> int:
        """What somebody has to look at first comes first; broken data, whose numbers mean nothing, after a bug."""
        return _WORST_FIRST.index(self.kind)


Cell = str | Markup | WrittenNumber | Badge


Row = TypeVar("Row")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table: its title, and the cell that it has for an object of the table."""

    title: str
    cell: Callable[[Row], Cell]
    is_text: bool = False
    """Set flush left."""
    can_lack_interval: bool = False
    """On a screen that is too narrow, its numbers stand without their intervals."""

    @classmethod
    def each(
        cls, items: Iterable[Item], title: Callable[[Item], str], cell: Callable[[Item, Row], Cell], **how: Any
    ) -> "list[Column[Row]]":
        """A column for each of the items: its title, and its cell for an object of the table."""
        return [Column(title(item), partial(cell, item), **how) for item in items]


@dataclass(frozen=True)
class Table:
    """The cells of a table; the first cell of a row is its header."""

    caption: str
    columns: Sequence[str]
    """The titles."""
    rows: Sequence[Sequence[Cell]]
    """Each as wide as `columns`."""
    text_columns: frozenset[int] = frozenset()
    can_lack_interval: frozenset[int] = frozenset()
    """Numbers of columns, as `Column` has it."""
    reading: str = ""
    """How to read it, under the caption."""
    is_folded: bool = False
    """It opens on request."""
    is_stacked: bool = False
    """Each row turns into a card on a narrow screen."""
    anchor: str = ""
    row_anchors: Sequence[str] = ()
    """The names of the rows, where they have any."""

    @classmethod
    def of(cls, caption: str, rows: Iterable[Row], columns: Sequence[Column[Row]], **how: Any) -> "Table":
        """One row for each object; a column that is empty in every row is left out. `how` are further fields of the
        table.
        """
        cells_by_row = [[column.cell(row) for column in columns] for row in rows]
        numbers = [
            number
            for number in range(len(columns))
            if not number or not cells_by_row or any(str(cells[number]) for cells in cells_by_row)
        ]
        shown_columns = [columns[number] for number in numbers]
        return cls(
            caption,
            [column.title for column in shown_columns],
            [[cells[number] for number in numbers] for cells in cells_by_row],
            frozenset(number for number, column in enumerate(shown_columns) if column.is_text),
            frozenset(number for number, column in enumerate(shown_columns) if column.can_lack_interval),
            **how,
        )


@dataclass(frozen=True)
class Heading:
    """Names a drawing: `description` is what a screen reader says for it, `reading` explains how to read it,
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
    """Panels that share a key, a caption that explains how to read them, and the numbers behind them.

    `dense` panels stand three in a row on a wide screen, others two; a single panel has its caption next to it. A panel
    that shows nothing is left out, and named in a sentence. `tables` open on request, together.
    """

    anchor: str
    caption: str
    panels: Sequence[Panel]
    tables: Sequence[Table]
    key: Sequence[tuple[str, PairStyle]] = ()
    dense: bool = False

    @property
    def drawn_panels(self) -> list[Panel]:
        return [panel for panel in self.panels if panel.shows_something]

    @property
    def left_out(self) -> str:
        """Which panels are left out and why; empty where none is."""
        titles = [f"“{panel.heading.title}”" for panel in self.panels if not panel.shows_something]
        return f"Left out, for too few responses or no deviation to draw: {join_names(titles)}." if titles else ""


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
    is_folded: bool = False


@dataclass(frozen=True)
class Command:
    """A command line to copy."""

    text: str


@dataclass(frozen=True)
class ColoredText:
    """A model's text, each token coloured by its deviation; `tokens` is HTML in which the text is inert.

    `log_mu` and `diff` are the numbers of the tokens, comma after comma, for the page's script to show; `first` is the
    number of the first token. `links` lead to what this text belongs to; `prompt` is the text that it answers.
    """

    anchor: str
    label: str
    tokens: Markup
    log_mu: str
    diff: str
    first: int
    prompt: str | None = None
    links: Sequence[tuple[str, str]] = ()
    is_open: bool = False


@dataclass(frozen=True)
class ColorScale:
    """Which colour stands for which deviation: the class of a token, and what it means."""

    steps: Sequence[tuple[str, str]]


Block = Figure | Table | Note | Finding | Command | ColoredText | ColorScale


@dataclass(frozen=True)
class Section:
    """`is_folded`: only the title is in sight at once."""

    anchor: str
    title: str
    lede: str
    blocks: Sequence[Block]
    is_folded: bool = False


@dataclass(frozen=True)
class Tile:
    """One large number or name, what it is above it and how to take it below."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Lines:
    """Sentences on a screen, one a line."""

    texts: Sequence[str]
    style: str = ""
    follows: bool = False
    """No blank line before it."""


@dataclass(frozen=True)
class Terms:
    """Sentences on a screen, each behind its word or two, which stand in a column of their own."""

    items: Sequence[tuple[str, str]]
    follows: bool = False


@dataclass(frozen=True)
class Answer:
    """What a command found. The screen and the page render the same one, so they cannot disagree."""

    subject: str
    """What it is about, as the page's title and the line above the headline say it."""
    model: str
    headline: str | Markup
    badge: Badge
    table: Table | None = None
    """On a page, under the headline."""
    tiles: Sequence[Tile] = ()
    """The few numbers that are asked for first."""
    facts: Sequence[str] = ()
    """On what it rests: sizes, settings, devices."""
    advice: Sequence[str] = ()
    """What to do next; a command at the end of a sentence stands between backticks."""
    command: str = ""
    """The command that the headline asks for; on a screen in the line below it."""
    further_advice: Sequence[str] = ()
    """That of the other pairs: a screen adds it, a page has it where each pair stands."""
    remarks: Sequence[str] = ()
    """On a page, under the table."""
    footnote: str | Markup = ""
    """How to read the table."""
    figure: Figure | None = None
    """On a page, at the end of the answer."""
    sections: Sequence[Section] = ()
    """On a page, below the answer."""
    screen: Sequence[Table | Lines | Terms] = ()
    """On a screen, below the headline."""
    is_last: bool = False
    """On a screen the headline stands below everything else but the advice, where the eye stops."""

    def as_section(self, anchor: str, title: str) -> Section:
        """The whole page under one heading: headline and advice, the table, the figure, then everything else."""
        lists = [("Advice", self.advice)] if self.advice else []
        blocks: list[Block] = [
            Finding(f"{anchor}-verdict", self.subject.capitalize(), self.badge, str(self.headline), lists),
        ]
        blocks += [block for block in (self.table, self.figure) if block is not None]
        blocks += [block for section in self.sections for block in section.blocks]
        return Section(anchor, title, " · ".join([*self.facts, self.footnote]), blocks)


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
    labels_by_absence: dict[tuple[str, str], list[str]] = {}
    for label, reasons in of_pairs:
        for reason in dict.fromkeys(reasons.values()):
            names = [_WORDS.get(name, name.replace("_", " ")) for name, why in reasons.items() if why == reason]
            labels_by_absence.setdefault((", ".join(names), reason), []).append(label)
    items = [f"{', '.join(labels)}: {names}, since {reason}" for (names, reason), labels in labels_by_absence.items()]
    return Note("What could not be had:", items) if items else None


def with_values(table: Table) -> Table:
    """The table without rows that hold no value; a sentence below says why they hold none."""
    absent = (ABSENT, WrittenNumber(ABSENT))
    return replace(table, rows=[row for row in table.rows if any(cell not in absent for cell in row[1:])])


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

    def fit_axis(self, axis: Axis, bounds: Sequence[float]) -> None:
        """Its range is that of all that is drawn; the page fits it again when a pair is hidden."""
        self.update_axis(axis, range=list(bounds))
        fitted_axes = self.layout.setdefault("meta", {"fitted": []})["fitted"]
        if f"{axis}axis" not in fitted_axes:
            fitted_axes.append(f"{axis}axis")

    def update_axis(self, axis: Axis, **properties: Any) -> None:
        self.layout.setdefault(f"{axis}axis", {}).update(properties)
