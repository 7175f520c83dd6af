"""What `make docs` makes the site with: pinned, as asked for, and with every public name in the reference."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mismatch_probe
from tests.docs.pages import DOCS, ROOT, Page
from tests.report.browser import Tab, needs_browser


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    return {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}


def test_the_lock_has_what_the_site_and_the_package_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["docs"])]
    locked = pins("docs.lock")
    assert [str(each) for each in requirements if not each.specifier.contains(locked.get(each.name.lower(), "0"))] == []


def test_example_pages_get_the_plotly_that_they_were_made_with() -> None:
    assert pins("docs.lock")["plotly"] == pins("cpu.lock")["plotly"]


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(
        r"auto\w+:: mismatch_probe\.(\w+)(?:\(\))?$", Page.read(DOCS / "api-reference.md").text, re.MULTILINE
    )
    assert sorted(named) == sorted(set(mismatch_probe.__all__) - {"__version__"})


def without_network(page: str) -> str:
    spec = importlib.util.spec_from_file_location("offline_pages", DOCS / "offline_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.without_network(page))


@pytest.mark.slow
@needs_browser
def test_an_example_page_draws_without_the_network(tab: Tab, tmp_path: Path) -> None:
    page = (ROOT / "reports" / "demo" / "report.html").read_text(encoding="utf-8")
    assert '<script src="http' in page
    offline = tmp_path / "report.html"
    offline.write_text(without_network(page), encoding="utf-8")
    assert '<script src="http' not in offline.read_text(encoding="utf-8")
    tab.open(offline)
    tab.draw_all()
    assert tab.console == []


def test_a_page_of_another_plotly_is_refused() -> None:
    page = '<script src="https://cdn.example/plotly.js" integrity="sha256-other" crossorigin="anonymous"></script>'
    with pytest.raises(ValueError, match=r"another plotly\.js"):
        without_network(page)
