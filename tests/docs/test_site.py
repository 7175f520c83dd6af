"""What `make docs` makes the site with: pinned, as asked for, and with every public name in the reference."""

import re
import tomllib

from packaging.requirements import Requirement

import mismatch_probe
from tests.docs.pages import DOCS, ROOT, Page


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    return {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}


def test_the_lock_has_what_the_site_and_the_package_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["docs"])]
    locked = pins("docs.lock")
    assert [str(each) for each in asked if not each.specifier.contains(locked.get(each.name.lower(), "0"))] == []


def test_example_pages_get_the_plotly_that_they_were_made_with() -> None:
    assert pins("docs.lock")["plotly"] == pins("cpu.lock")["plotly"]


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"auto\w+:: mismatch_probe\.(\w+)", Page.read(DOCS / "api-reference.md").text)
    assert sorted(named) == sorted(set(mismatch_probe.__all__) - {"__version__"})
