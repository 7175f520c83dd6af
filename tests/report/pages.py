"""What a page holds, read as a browser would."""

import json
import re
from typing import Any

from mismatch_probe.report.rendering import unpack

Figure = dict[str, Any]

SCRIPTS = {"summary": "text/plain", "figures": "text/plain", "plotlyjs": "text/plain", None: None}
"""The scripts of a page by id, with their types: three hold data, the last is the page's own."""


def scripts_of(page: str) -> dict[str | None, str | None]:
    tags = re.findall(r"<script([^>]*)>", page)
    found = [(re.search(r'id="(\w+)"', tag), re.search(r'type="([\w/]+)"', tag)) for tag in tags]
    assert len(tags) == len(SCRIPTS)
    return {name and name[1]: kind and kind[1] for name, kind in found}


def drawings(page: str) -> dict[str, Figure]:
    """Plotly's specifications of a page's drawings, by anchor."""
    match = re.search(r'<script type="text/plain" id="figures">([^<]*)</script>', page)
    assert match is not None
    return json.loads(unpack(match[1]))["figures"]  # type: ignore[no-any-return]


def embedded(page: str) -> Any:
    """The summary that a page carries."""
    text = re.search(r'<script type="text/plain" id="summary">([^<]*)</script>', page)
    assert text is not None
    return json.loads(unpack(text[1]))


def traces(drawing: Figure, **like: Any) -> list[dict[str, Any]]:
    """The traces of a drawing with these values; a double underscore leads inwards (`marker__symbol`)."""

    def value(trace: dict[str, Any], name: str) -> Any:
        inner: Any = trace
        for part in name.split("__"):
            inner = inner.get(part, {}) if isinstance(inner, dict) else {}
        return inner

    return [trace for trace in drawing["data"] if all(value(trace, name) == wanted for name, wanted in like.items())]


def words(drawing: Figure) -> str:
    """Everything in a drawing that somebody reads."""
    return json.dumps(drawing, ensure_ascii=False)
