"""From an answer to one HTML file: templates, figures that can be zoomed, and the content policy.

The policy admits the page's own script and plotly.js alone.
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mismatch_probe.inert import plain
from mismatch_probe.notation import WrittenNumber
from mismatch_probe.report.figures.canvas import theme
from mismatch_probe.report.names import KEY_MARKERS, ON_ONE_LINE, SIGNS, advice_parts, visible, visible_sentence
from mismatch_probe.report.view import Answer, Badge, Block, Cell, Figure, Panel

_OWN_SCRIPTS = ("unpack.js", "page.js", "responses.js")
_CDN = "https://cdn.plot.ly/plotly-{version}.min.js"


class PlotlyJs(StrEnum):
    """Where a page has plotly.js from: compressed in the page, which then needs no network, or plotly's own server."""

    EMBED = "embed"
    CDN = "cdn"


def plotly_js_of(page: Path) -> PlotlyJs:
    """Where the page that lies at this path has it from; a page that is not there yet has it in itself."""
    try:
        text = page.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return PlotlyJs.EMBED
    return PlotlyJs.CDN if f'<script src="{_CDN.partition("{")[0]}' in text else PlotlyJs.EMBED


@dataclass(frozen=True)
class Scripts:
    """`sources` is the policy's list of what may run; plotly.js is packed in the page, or fetched from `url`."""

    sources: str
    own: Markup
    packed_source: str = ""
    url: str = ""
    integrity: str = ""


@cache
def scripts(plotly_js: PlotlyJs, *, draws: bool = True) -> Scripts:
    """The same installed plotly gives the same bytes; a page that draws nothing has none of it."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    templates = files("mismatch_probe.report").joinpath("templates")
    own = "\n".join(_compact(templates.joinpath(name).read_text(encoding="utf-8")) for name in _OWN_SCRIPTS)
    if not draws:
        return Scripts(f"'{_digest(own)}'", Markup(own))
    source: str = get_plotlyjs()
    integrity = _digest(source)
    if plotly_js is PlotlyJs.CDN:
        url = _CDN.format(version=get_plotlyjs_version())
        return Scripts(f"'{_digest(own)}' {url}", Markup(own), url=url, integrity=integrity)
    return Scripts(f"'{_digest(own)}' '{integrity}'", Markup(own), packed_source=pack(source))


def packed_figures(panels: Iterable[Panel]) -> Markup:
    """The specifications of a page's drawings by their anchors, with the theme that they share."""
    figures: dict[str, Any] = {panel.heading.anchor: panel.specification for panel in panels}
    return packed_json({"theme": theme(), "figures": figures})


def packed_json(document: Any) -> Markup:
    return pack(json.dumps(document, allow_nan=False, separators=(",", ":")))


def pack(text: str) -> Markup:
    """Compressed by gzip, in base 85 with a comma for its `<`: what may stand in a script, and what `unpack` reads."""
    base85 = base64.b85encode(gzip.compress(text.encode("utf-8"), mtime=0)).decode("ascii")
    return Markup(base85.replace("<", ","))


def unpack(text: str) -> str:
    return gzip.decompress(base64.b85decode(text.encode().replace(b",", b"<"))).decode("utf-8")


def _compact(script: str) -> str:
    """The script without indentation and lines of comments, which a reader of the page has no use for."""
    lines = (line.strip() for line in script.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _compact_styles(styles: str) -> Markup:
    """The styles without indentation and the last semicolon of a rule."""
    return Markup("\n".join(line.strip() for line in styles.splitlines()).replace("; }", " }"))


def _digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}"


_NEGATIVE = re.compile(r"-\d[\d.,]*(e-?\d+)?", re.ASCII)
"""No line break may cut it behind its minus."""
_WORD = re.compile(r"([^ \n]+)")


def render_page(
    answer: Answer, plotly_js: PlotlyJs, *, tool_version: str, sources: Sequence[str], document: Any
) -> str:
    """The page of an answer; the same values give the same bytes.

    sources: the files that it was made from. document: the JSON document that the page carries too.
    """
    blocks = [answer.figure, *(block for section in answer.sections for block in section.blocks)]
    panels = [panel for block in blocks if isinstance(block, Figure) for panel in block.drawn_panels]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            scripts=scripts(plotly_js, draws=bool(panels)),
            figures=packed_figures(panels) if panels else "",
            document=packed_json(document),
            answer=answer,
            tool_version=tool_version,
            sources=sources,
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
    environment.filters.update(
        styles=_compact_styles, cell=_cell, visible=_visible, advice=_advice_markup, command=_code
    )
    environment.globals["markers"] = KEY_MARKERS
    environment.tests.update({kind.__name__: _is_named(kind.__name__) for kind in get_args(Block)})
    return environment


def _is_named(name: str) -> Any:
    return lambda block: type(block).__name__ == name


def _inert(value: Any) -> Any:
    """What a template puts in without a filter: text loses its power, HTML is HTML already."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _visible(text: str | Markup) -> Markup:
    """What is HTML already stays as it is."""
    return text if isinstance(text, Markup) else visible_sentence(text)


def _advice_markup(text: str | Markup) -> Markup:
    """A command at the end is set as code, and what stands between backticks before; no line ends inside one of their
    words. What is HTML already stays as it is.
    """
    if isinstance(text, Markup):
        return text
    what, command = advice_parts(text)
    pieces = [_code(piece) if number % 2 else _visible(piece) for number, piece in enumerate(what.split("`"))]
    return Markup("").join([*pieces, Markup(": "), _code(command)] if command else pieces)


def _code(text: str) -> Markup:
    """No line ends inside a word, as it would behind the hyphens of `--dtype`."""
    pieces = [
        Markup("<span>{}</span>").format(visible(piece)) if number % 2 else piece
        for number, piece in enumerate(_WORD.split(text))
    ]
    return Markup("<code>{}</code>").format(Markup("").join(pieces))


def _cell(cell: Cell) -> Markup:
    if isinstance(cell, Badge):
        return Markup('<span class="badge {}"><span aria-hidden="true">{}</span> {}</span>').format(
            cell.kind, SIGNS[cell.kind], visible(cell.words)
        )
    if isinstance(cell, WrittenNumber):
        interval = Markup(" <small>{}</small>").format(cell.interval) if cell.interval else ""
        return Markup("<b>{}</b>").format(cell.value) + interval
    if isinstance(cell, str) and (_NEGATIVE.fullmatch(cell) or ON_ONE_LINE.fullmatch(cell)):
        return Markup("<b>{}</b>").format(cell)
    return _visible(cell)
