"""`docs/metrics.md` has a row for every metric, with the names and the limits that other frameworks give it."""

import re
from typing import get_args

import pytest

from mismatch_probe.gate.claims import known_metrics
from mismatch_probe.gate.config import Check, PresetName, preset_checks
from mismatch_probe.stats.corrections import SEQUENCE_RULES, TOKEN_RULES
from mismatch_probe.train.trackers import ALIASES
from tests.docs.pages import DOCS, Page

PAGE = Page.read(DOCS / "metrics.md")


def rows(page: Page) -> dict[str, list[str]]:
    """The cells after the first of each metric's row; `_max` after a name lengthens it."""
    cells_of: dict[str, list[str]] = {}
    for first, *cells in _table(page, "metric | formula"):
        stem, *others = re.findall(r"`([^`]+)`", first)
        for name in (stem, *(stem + other if other.startswith("_") else other for other in others)):
            cells_of[name] = cells
    return cells_of


def other_names(page: Page) -> dict[str, str]:
    """What others call each metric that they have."""
    named = _table(page, "metric | what others call it")
    return {name: others for first, others in named for name in re.findall(r"`([^`]+)`", first)}


def _table(page: Page, header: str) -> list[list[str]]:
    table = page.text.split(f"| {header}")[1].split("\n\n")[0]
    return [line.strip("|").split("|") for line in table.splitlines()[2:]]


def test_every_metric_has_its_row_and_no_other_has() -> None:
    assert rows(PAGE).keys() == known_metrics()


def test_a_row_that_is_missing_is_seen() -> None:
    assert rows(Page(PAGE.path, PAGE.text.replace("`top1_flip`", "`top1_flips`"))).keys() != known_metrics()


def test_every_name_of_another_framework_stands_in_its_metrics_row() -> None:
    """Of those that trackers are sent; one row holds a metric's aggregates."""
    own_names = [(alias, own) for names in ALIASES.values() for alias, own in names.items()]
    mismatch = [(alias, own.removeprefix("mismatch/")) for alias, own in own_names if own.startswith("mismatch/")]
    assert len(mismatch) >= 15
    for alias, own in mismatch:
        row = max((name for name in other_names(PAGE) if own.startswith(name)), key=len)
        assert f"`{alias}`" in other_names(PAGE)[row], (alias, own)


@pytest.mark.parametrize("preset", get_args(PresetName))
def test_every_preset_names_its_framework_in_the_band(preset: PresetName) -> None:
    framework = {"bitwise": "torchtitan", "nemo-rl": "NeMo-RL"}.get(preset, preset)
    for check in (check for check in preset_checks(preset) if isinstance(check, Check)):
        assert framework in rows(PAGE)[check.metric][1], check.metric


def test_every_correction_is_named() -> None:
    for rule in (*TOKEN_RULES, *SEQUENCE_RULES):
        name = rule.also_known_as.split(" where ")[0].split(", advantage")[0]
        assert f"| {name} |" in PAGE.text or name == "token-level importance sampling", rule.name


def test_a_training_runs_metrics_of_that_name_are_those_of_a_comparison() -> None:
    [row] = re.findall(r"^\| (.+) \| of that name in ", Page.read(DOCS / "train-metrics.md").text, re.MULTILINE)
    assert {name.removeprefix("mismatch/") for name in re.findall(r"`([^`]+)`", row)} <= known_metrics()
