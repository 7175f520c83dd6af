"""`docs/metrics.md` has a row for every metric, with the names and the limits that other frameworks give it."""

import re

import pytest

from mismatch_probe.gate.metric_names import known_metrics
from mismatch_probe.gate.presets import PRESETS
from mismatch_probe.stats.rules import SEQUENCE_RULES, TOKEN_RULES
from mismatch_probe.train.aliases import ALIASES
from tests.docs.pages import DOCS, Page

PAGE = Page.read(DOCS / "metrics.md")


def rows(page: Page) -> dict[str, list[str]]:
    """The cells after the first of each metric's row; `_max` after a name lengthens it."""
    table = page.text.split("\n## ")[0].split("| metric |")[1]
    told: dict[str, list[str]] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            first, *cells = line.strip("|").split("|")
            stem, *others = re.findall(r"`([^`]+)`", first)
            for name in (stem, *(stem + other if other.startswith("_") else other for other in others)):
                told[name] = cells
    return told


def test_every_metric_has_its_row_and_no_other_has() -> None:
    assert rows(PAGE).keys() == known_metrics()


def test_a_row_that_is_missing_is_seen() -> None:
    assert rows(Page(PAGE.path, PAGE.text.replace("| `top1_flip` |", "| top1_flip |"))).keys() != known_metrics()


def test_every_name_of_another_framework_stands_in_its_metrics_row() -> None:
    """Of those that trackers are sent; a step's `is_ratio_mean` has its level in its name here."""
    own_names = [(alias, own) for names in ALIASES.values() for alias, own in names.items()]
    mismatch = [(alias, own.removeprefix("mismatch/")) for alias, own in own_names if own.startswith("mismatch/")]
    assert len(mismatch) >= 15
    for alias, own in mismatch:
        assert f"`{alias}`" in rows(PAGE)[own][2], (alias, own)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_names_its_framework_in_the_band(preset: str) -> None:
    framework = {"bitwise": "torchtitan", "nemo-rl": "NeMo-RL"}.get(preset, preset)
    for check in PRESETS[preset]:  # type: ignore[index]
        assert framework in rows(PAGE)[check.metric][1], check.metric


def test_every_correction_is_named() -> None:
    for rule in (*TOKEN_RULES, *SEQUENCE_RULES):
        name = rule.also_known_as.split(" where ")[0].split(", advantage")[0]
        assert f"| {name} |" in PAGE.text or name == "token-level importance sampling", rule.name
