"""docs/train-metrics.md names what is recorded and sent, no more and no less."""

import re
from pathlib import Path

from mismatch_probe.train.preparation import recorded_metrics
from mismatch_probe.train.trackers import ALIASES

MANUAL = (Path(__file__).parents[2] / "docs" / "train-metrics.md").read_text(encoding="utf-8")


def test_every_alias_stands_in_the_manual_with_what_it_means() -> None:
    rows = set(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| ([\w-]+ \w+) \|$", MANUAL, re.MULTILINE))
    assert rows == {(alias, own, name) for name, found in ALIASES.items() for alias, own in found.items()}


def test_the_manual_names_every_metric_that_guards_may_read_and_no_other() -> None:
    assert documented() == {name for name in recorded_metrics(has_critic=True) if not name.startswith("time/")}


def documented() -> set[str]:
    """Names in the first column of the first table; `_max` after a name lengthens it."""
    names: set[str] = set()
    for line in MANUAL.split("## Trackers")[0].splitlines():
        if line.startswith("| `") and not line.startswith(("| `time/", "| `resync/", "| `guards/")):
            stem, *others = re.findall(r"`([^`]+)`", line.split("|")[1])
            names |= {stem, *(stem + other if other.startswith("_") else other for other in others)}
    return names
