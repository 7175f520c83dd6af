"""How `make docs` makes the site: strict, and without anything from the network."""

import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.inspect import TypeAliasForwardRef

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from offline_pages import without_network  # noqa: E402

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

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: f"mismatch_probe.arrays.{name}" for name in ("ArrayLike", "LabelsLike")}
autodoc_member_order = "bysource"


def inline_attribute(docstring: GoogleDocstring) -> tuple[str, list[str]]:
    """The type and the text of a property: what stands before a colon is a part of its sentence, not its type."""
    lines = docstring._dedent(docstring._consume_to_end())
    return "", GoogleDocstring(lines, docstring._config).lines()


GoogleDocstring._consume_inline_attribute = inline_attribute
TypeAliasForwardRef.__repr__ = lambda alias: alias.name  # as it is written in a union, where Sphinx shows its own class
nitpick_ignore_regex = [
    ("py:.*", r"(?!mismatch_probe\.).*")
]  # types of other packages, whose documents are not at hand


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


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", link_reports, priority=100)
    app.connect("build-finished", copy_reports)
