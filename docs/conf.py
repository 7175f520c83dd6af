"""How `make docs` makes the site: strict, and without anything from the network."""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx
from sphinx.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "mismatch-probe"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
highlight_language = "none"
default_role = "code"  # `name` in a docstring

myst_heading_anchors = 4

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages, whose documents are not at hand

_FETCHED = re.compile(r'<script src="(?P<url>[^"]+)" integrity="(?P<digest>[^"]+)"[^>]*></script>')


def link_reports(app: Sphinx, doctree: nodes.document) -> None:
    """Links to the example reports open the pages that `copy_reports` puts beside the site's own."""
    for link in list(doctree.findall(download_reference)):
        if link["reftarget"].startswith("../reports/"):
            link.replace_self(nodes.reference("", "", *link.children, refuri=link["reftarget"].removeprefix("../")))


def copy_reports(app: Sphinx, error: Exception | None) -> None:
    for page in (ROOT / "reports").rglob("*.html"):
        copy = Path(app.outdir) / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(without_network(page.read_text(encoding="utf-8")), encoding="utf-8")


def without_network(page: str) -> str:
    """A report with plotly.js in it where it would fetch it.

    Raises:
        ConfigError: the installed plotly.js is another one than the page was made with.
    """
    from mismatch_probe.report.interactive import PlotlyJs, scripts

    fetched = _FETCHED.search(page)
    if fetched is None:
        return page
    embedded, digest = scripts(PlotlyJs.EMBED), fetched["digest"]
    if digest not in embedded.sources:
        raise ConfigError("plotly in requirements/docs.lock has another plotly.js than the pages in reports/")
    packed = f'<script type="text/plain" id="plotlyjs">{embedded.packed}</script>'
    return page.replace(fetched[0], packed).replace(f" {fetched['url']};", f" '{digest}';", 1)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", link_reports, priority=100)
    app.connect("build-finished", copy_reports)
