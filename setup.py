"""The description that a package index shows: README.md, with links made absolute where the project has an address.

The address is `Repository` in `[project.urls]` of pyproject.toml, which stands there once and is read here; without
one the links stay relative, as they are in the repository.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)")


def description() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository", "").rstrip("/")
    if not repository:
        return readme
    version = re.findall(r'^__version__ = "(.+)"$', (ROOT / "mismatch_probe/__init__.py").read_text(), re.MULTILINE)[0]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{kind}/v{version}/{link['path']})"

    return LINK.sub(absolute, readme)


setup(long_description=description(), long_description_content_type="text/markdown")
