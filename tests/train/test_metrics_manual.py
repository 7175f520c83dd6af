"""docs/train-metrics.md names what is recorded and sent, no more and no less."""

import re
from pathlib import Path

import numpy as np

from mismatch_probe.train.aliases import ALIASES
from mismatch_probe.train.measure import mismatch_metrics
from mismatch_probe.train.rollouts import Rollout
from tests.report.training.training_runs import TrainingSample, step_metrics

MANUAL = (Path(__file__).parents[2] / "docs" / "train-metrics.md").read_text(encoding="utf-8")


def test_every_alias_stands_in_the_manual_with_what_it_means() -> None:
    rows = set(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| ([\w-]+ \w+) \|$", MANUAL, re.MULTILINE))
    assert rows == {(alias, own, name) for name, found in ALIASES.items() for alias, own in found.items()}


def test_every_metric_that_is_recorded_stands_in_the_manual(rollouts: list[Rollout]) -> None:
    log_pi = np.concatenate([one.mu_logprobs for one in rollouts])
    recorded = {*mismatch_metrics(rollouts, log_pi, np.ones(len(log_pi))), *step_metrics(1, TrainingSample())}
    assert {name for name in recorded if not name.startswith("time/")} <= documented()


def documented() -> set[str]:
    """Names in the first column of the first table; `_max` after a name lengthens it."""
    names: set[str] = set()
    for line in MANUAL.split("## Trackers")[0].splitlines():
        if line.startswith("| `"):
            stem, *others = re.findall(r"`([^`]+)`", line.split("|")[1])
            names |= {stem, *(stem + one if one.startswith("_") else one for one in others)}
    return names
