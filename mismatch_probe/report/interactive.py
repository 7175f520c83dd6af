"""What makes the figures of a page interactive: their specifications, plotly.js, the page's own script, and the policy
that admits these two scripts alone.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mismatch_probe.report.figures.theme import theme
from mismatch_probe.report.view import Panel

_OWN_SCRIPTS = ("page.js", "responses.js")
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
    """`sources` is the policy's list of what may run; plotly.js is `packed`, or fetched from `url` and checked."""

    sources: str
    own: Markup
    packed: str = ""
    url: str = ""
    integrity: str = ""


@cache
def scripts(plotly_js: PlotlyJs, *, draws: bool = True) -> Scripts:
    """The same installed plotly gives the same bytes; a page that draws nothing has none of it."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    templates = files("mismatch_probe.report").joinpath("templates")
    own = "".join(templates.joinpath(name).read_text(encoding="utf-8") for name in _OWN_SCRIPTS)
    if not draws:
        return Scripts(f"'{_digest(own)}'", Markup(own))
    source: str = get_plotlyjs()
    integrity = _digest(source)
    if plotly_js is PlotlyJs.CDN:
        url = _CDN.format(version=get_plotlyjs_version())
        return Scripts(f"'{_digest(own)}' {url}", Markup(own), url=url, integrity=integrity)
    return Scripts(f"'{_digest(own)}' '{integrity}'", Markup(own), packed=packed(source))


def packed_figures(panels: Iterable[Panel]) -> Markup:
    """The specifications of a page's drawings by their anchors, with the theme that they share."""
    figures: dict[str, Any] = {panel.heading.anchor: panel.specification for panel in panels}
    return packed_json({"theme": theme(), "figures": figures})


def packed_json(document: Any) -> Markup:
    return packed(json.dumps(document, allow_nan=False, separators=(",", ":")))


def packed(text: str) -> Markup:
    """Compressed by gzip, in base 85 with a comma for its `<`: what may stand in a script, and `unpacked` may read."""
    encoded = base64.b85encode(gzip.compress(text.encode("utf-8"), mtime=0)).decode("ascii")
    return Markup(encoded.replace("<", ","))


def unpacked(text: str) -> str:
    return gzip.decompress(base64.b85decode(text.encode().replace(b",", b"<"))).decode("utf-8")


def _digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}"
