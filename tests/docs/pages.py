"""The README and the pages of `docs/` as tests read them: prose, code blocks, headings."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> "Page":
        return cls(path, path.read_text(encoding="utf-8"))

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and text of each code block."""
        return [(fence["language"], fence["body"]) for fence in _FENCE.finditer(self.text)]

    @property
    def prose(self) -> str:
        """Without code blocks."""
        return _FENCE.sub("", self.text)

    @property
    def code_in_prose(self) -> list[str]:
        return re.findall(r"`([^`\n]+)`", self.prose)

    @property
    def anchors(self) -> set[str]:
        """Of the headings, as the repository's host and the site's generator make them."""
        return {slug(heading) for heading in _HEADING.findall(self.prose)}


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")


def pages() -> list[Page]:
    return [Page.read(path) for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))]
