"""The three things asked first of a training run: what it learnt, how far apart the sides are, what to do."""

from mismatch_probe.notation import write_number
from mismatch_probe.records.training_run import MetricCourse, TrainingSummary
from mismatch_probe.report.names import listed
from mismatch_probe.report.training.guard_words import times
from mismatch_probe.report.training.headline import stopping_guards
from mismatch_probe.report.training.summarise import MISMATCH, REWARD
from mismatch_probe.report.view import Tile
from mismatch_probe.verdict.headline import KL_LIMIT, against_limit


def training_tiles(summary: TrainingSummary) -> list[Tile]:
    """None before the first step."""
    if not summary.steps:
        return []
    tiles = []
    if (reward := summary.metrics.get(REWARD)) is not None:
        tiles.append(Tile("Reward at the end", write_number(reward.last), f"{write_number(reward.first)} at the start"))
    if (mismatch := summary.metrics.get(MISMATCH)) is not None:
        tiles.append(Tile("KL per token at the end", write_number(mismatch.last), _against_limit(mismatch)))
    return [*tiles, _guards(summary)]


def _against_limit(mismatch: MetricCourse) -> str:
    begun = f"{write_number(mismatch.first)} at the start"
    if mismatch.last is None:
        return begun
    return f"{begun}; {against_limit(mismatch.last)} ({KL_LIMIT:g})"


def _guards(summary: TrainingSummary) -> Tile:
    if not summary.num_events:
        return Tile("Guards", "silent", "none saw a reason to act")
    names = stopping_guards(summary) if summary.outcome == "stopped" else []
    if names:
        return Tile("Stopped by", listed(names), f"at step {summary.steps:,}; guards fired {times(summary.num_events)}")
    return Tile("Guards", f"fired {times(summary.num_events)}", listed([guard.guard for guard in summary.guards]))
