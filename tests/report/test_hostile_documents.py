"""Every free text of every document, an attack at once: the page is made, whole, and nothing in it acts."""

import json
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel, ValidationError

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.page import render_document, render_html
from tests.report import samples
from tests.report.documents import headroom, localization
from tests.report.pages import SCRIPTS, scripts_of
from tests.report.test_hostile import PAYLOADS
from tests.report.test_page import parsed

Document = TypeVar("Document", bound=BaseModel)

PAIR: samples.Pairs = ((Dtype.BF16, Dtype.BF16),)
FINDINGS = {"headroom": headroom(1e5), "localize": localization(suspect_layer=5)}
UNSEEN = set("\x00\x1b\x07\u202e\u2066\u2028\u2029\ufeff\ud800")


def texts(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict | list):
        for key, below in node.items() if isinstance(node, dict) else enumerate(node):
            yield from texts(below, (*path, key))
    elif isinstance(node, str):
        yield path


def attacked(document: Document, payload: str, least: int = 11) -> Document:
    """`payload` behind every text for which the reader takes it, `least` of them."""
    raw = json.loads(document.model_dump_json())
    before = {path: _put(raw, path, payload, behind=True) for path in texts(raw)}
    while True:
        assert len(before) >= least
        try:
            return type(document).model_validate(raw)
        except ValidationError as error:
            refused = before.keys() & {details["loc"] for details in error.errors(include_url=False)}
            if not refused:
                raise
        for path in refused:
            _put(raw, path, before.pop(path))


def _put(raw: Any, path: tuple[Any, ...], text: str, *, behind: bool = False) -> str:
    """The text that was there; the new one takes its place, or stands behind it."""
    *above, last = path
    for key in above:
        raw = raw[key]
    before: str = raw[last]
    raw[last] = before + text if behind else text
    return before


def assert_acts_not(page: str) -> None:
    found = parsed(page)
    assert found.open == []
    assert scripts_of(page) == SCRIPTS
    assert not [tag for tag, attributes in found.elements if tag == "img" or "onload" in attributes]
    assert not UNSEEN & set(page)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("document", FINDINGS.values(), ids=FINDINGS)
def test_what_headroom_and_localize_file(document: BaseModel, payload: str) -> None:
    assert_acts_not(render_document(attacked(document, payload)))


@pytest.mark.slow
@pytest.mark.parametrize("payload", [PAYLOADS["formula"], "".join(PAYLOADS.values())], ids=["formula", "all"])
def test_what_a_run_files(payload: str) -> None:
    small = samples.summary(PAIR, samples.Simulation(num_responses=16, longest=64))
    summary: Summary = attacked(small, payload)
    manifest: Manifest = attacked(samples.manifest(PAIR), payload)
    assert_acts_not(render_html(summary, manifest))
