"""From sections to HTML: the templates with what they need to show a block."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mismatch_probe.inert import plain
from mismatch_probe.notation import Written
from mismatch_probe.report.advice import parted
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.interactive import PlotlyJs, packed_figures, packed_json, scripts
from mismatch_probe.report.names import KEY_MARKERS, SIGNS
from mismatch_probe.report.view import Badge, Block, Cell, Figure, Overview, Section

_NEGATIVE = re.compile(r"-\d[\d.,]*(e-?\d+)?", re.ASCII)
"""No line break may cut it behind its minus."""
_WHOLE = re.compile(r"\d[\d.]*e-\d+|\d[\d.,]* %", re.ASCII)


def rendered_page(
    plotly_js: PlotlyJs, overview: Overview, sections: Sequence[Section], embedded: Any, **values: Any
) -> str:
    """A page in which the JSON document `embedded` lies too; the same values give the same bytes."""
    blocks = [overview.figure, *(block for section in sections for block in section.blocks)]
    panels = [panel for block in blocks if isinstance(block, Figure) for panel in block.drawn]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            scripts=scripts(plotly_js, draws=bool(panels)),
            figures=packed_figures(panels) if panels else "",
            embedded=packed_json(embedded),
            overview=overview,
            sections=sections,
            **values,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("mismatch_probe.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_inert,
    )
    environment.filters.update(cell=_cell, visible=_visible, advice=_advice)
    environment.globals["markers"] = KEY_MARKERS
    environment.tests.update({kind.__name__: _is_named(kind.__name__) for kind in get_args(Block)})
    return environment


def _is_named(name: str) -> Any:
    return lambda block: type(block).__name__ == name


def _inert(value: Any) -> Any:
    """What a template puts in without a filter: text loses its power, HTML is HTML already."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _visible(text: str | Markup) -> Markup:
    """No line ends inside a number, as it would after the hyphen of `7.1e-5`, or before its `%`; what is HTML already
    stays as it is.
    """
    if isinstance(text, Markup):
        return text
    return Markup(_WHOLE.sub(r'<span class="whole">\g<0></span>', str(visible(text))))


def _advice(text: str | Markup) -> Markup:
    """A command at the end is set as code, and what stands between backticks before; no line ends inside one of their
    words. What is HTML already stays as it is.
    """
    if isinstance(text, Markup):
        return text
    what, command = parted(text)
    pieces = [_code(piece) if number % 2 else _visible(piece) for number, piece in enumerate(what.split("`"))]
    return Markup("").join([*pieces, Markup(": "), _code(command)] if command else pieces)


def _code(text: str) -> Markup:
    words = Markup(" ").join(Markup("<span>{}</span>").format(visible(word)) for word in text.split())
    return Markup("<code>{}</code>").format(words)


def _cell(cell: Cell) -> Markup:
    if isinstance(cell, Badge):
        return Markup('<span class="badge {}"><span aria-hidden="true">{}</span> {}</span>').format(
            cell.kind, SIGNS[cell.kind], visible(cell.words)
        )
    if isinstance(cell, Written):
        interval = Markup(" <small>{}</small>").format(cell.interval) if cell.interval else ""
        return Markup("<b>{}</b>").format(cell.value) + interval
    if isinstance(cell, str) and (_NEGATIVE.fullmatch(cell) or _WHOLE.fullmatch(cell)):
        return Markup("<b>{}</b>").format(cell)
    return _visible(cell)
