"""Metrics alone: what they tell at once, and how guards judge their steps one after the other.

A guard reads a number of a trainer where the table of names says which of ours it is. Where KL (k3) was not logged, the
least that it can be stands for it: h(x) = e^-x + x - 1 is convex and h(x) / x^2 falls, and a token's k3 is at least
h(|d|), so that k3 >= h(mean |d|), and k3 >= (r / M)^2 h(M) of the root mean square r and the largest M of |d|.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.importing.following import MetricStep
from mismatch_probe.importing.watching import JudgedStep, StepWatch
from mismatch_probe.logs.metric_files import MetricLog
from mismatch_probe.logs.metric_names import OWN_NAMES, loop_names, metric_names, quantity_words
from mismatch_probe.provenance import environment
from mismatch_probe.records.lines import Contradiction, CurveReading
from mismatch_probe.stats.catalogue import METRICS, metric_words
from mismatch_probe.verdict.curves import NamedCurve, contradictions_of, curve_sentence, read_curves, rises

KL: Final = "mismatch/kl_k3"
_ELSEWHERE: Final = {
    "is_ratio_mean_token": "mismatch/is_ratio_mean",
    "entropy": "policy/entropy",
    "share_masked": "correction/rejected_share",
    "weight_share_above": "correction/clipped_share",
    "ess_clamped": "mismatch/ess_token",
}
"""Metrics that guards know by another name; the ESS of clamped weights is at least that of the weights."""
_WINDOW: Final = 64
_FEWEST_OF_LUCK: Final = 4
"""Steps at which an estimate must be void before it is reported."""
_BOUND: Final = (
    "KL (k3) is not in this log: guards judge the least that it can be with these sizes of d, so that a breach is "
    "sure and a pass is not"
)
_NOTHING: Final = "it has no number that a guard reads"


def names_to_follow(guards: Iterable[GuardSettings]) -> frozenset[str]:
    """What is read of a log that guards judge: the known names, and those that the guards read as they stand."""
    return frozenset({*metric_names(), *loop_names(), *(name for guard in guards for name in guard.metrics)})


def _guard_names(names: Iterable[str]) -> dict[str, str]:
    """What guards know each name as, by the trainer's; one that stands as guards know it comes first."""
    table = metric_names()
    own_names = {}
    for name in names:
        if name in table:
            metric = table[name].metric
            own = _ELSEWHERE.get(metric, f"mismatch/{metric}" if metric in METRICS else None)
        else:
            own = loop_names().get(name, name)
        if own is not None:
            own_names[name] = own
    return dict(sorted(own_names.items(), key=lambda item: item[0] == item[1]))


def guard_metrics(values: Mapping[str, float]) -> Metrics:
    """The metrics that guards read, of a step's numbers under the trainer's names."""
    metrics = {own: values[name] for name, own in _guard_names(values).items()}
    if "optim/grad_norm" in metrics:
        is_lost = not np.isfinite(metrics["optim/grad_norm"])
        metrics = {"optim/nonfinite_gradients": float(is_lost)} | metrics
    if KL not in metrics and (least := _least_k3(values)) is not None:
        metrics[KL] = least
    return metrics


def _least_k3(values: Mapping[str, float]) -> float | None:
    """A lower bound of KL (k3) by the sizes of d that were logged; None where none was."""
    table = metric_names()
    of = {table[name].metric: value for name, value in values.items() if name in table}
    means = [of[name] for name in ("abs_logprob_diff", "abs_logprob_diff_seq", "prob_abs_diff") if name in of]
    bounds = [_h(mean) for mean in means]
    if of.keys() >= {"abs_logprob_diff", "abs_logprob_diff_std", "abs_logprob_diff_max"}:
        largest = of["abs_logprob_diff_max"]
        square = of["abs_logprob_diff"] ** 2 + of["abs_logprob_diff_std"] ** 2
        bounds += [square / largest**2 * _h(largest)] if largest > 0 else []
    return max(bounds) if bounds else None


def _h(size: float) -> float:
    size = max(size, 0.0) if size == size else size
    return float(np.exp(-size) + size - 1)


class MetricWatch(StepWatch):
    """Judges the steps of metrics alone; the first step decides which guards can judge them."""

    def __init__(self, guards: tuple[GuardSettings, ...], source: Path) -> None:
        super().__init__(guards)
        self._source = source
        self._log = MetricLog()
        self._counts: Counter[str] = Counter()
        self._num_judged = 0
        self._laws_named: set[str] = set()
        self.bounds: dict[str, str] = {}

    def judge(self, step: MetricStep) -> JudgedStep:
        """
        Raises:
            UsageError: the log gives what no guard reads.
        """
        for name, value in step.values.items():
            self._log.series.setdefault(name, {})[step.number] = value
        metrics = guard_metrics(step.values)
        result = JudgedStep(step.number, 0, 0, {}, (), (), contradictions=tuple(self._new_contradictions()))
        if not metrics:
            return replace(result, why_not=_NOTHING)
        if KL in metrics and KL not in _guard_names(step.values).values():
            result = replace(result, bounds=(KL,))
            self.bounds[KL] = _BOUND
        self._num_judged += 1
        self._counts.update(metrics.keys())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `off` is shown instead
            other_names = guard_metrics(dict.fromkeys(step.names, 0.0)).keys() - metrics.keys()
            decision = self._guards.judge(step.number, metrics, canary=False, withheld=other_names)
        if len(self.guards_off) == self.num_guards:
            raise UsageError(
                f"the log gives {', '.join(sorted(metrics))}, and no guard reads any of it; give --guards a file "
                "with guards on these"
            )
        missing = tuple(name for name in decision.firings.missing if 2 * self._counts[name] >= self._num_judged)
        return replace(result, metrics=metrics, events=decision.events, missing=missing)

    def _new_contradictions(self) -> Iterator[Contradiction]:
        """The laws that the newest steps break, each once."""
        for each in contradictions_of(list(_named_curves(self._log, _WINDOW))):
            if each.law not in self._laws_named and (each.is_exact or each.num_steps >= _FEWEST_OF_LUCK):
                self._laws_named.add(each.law)
                yield each

    def warning(self) -> str | None:
        """How the mismatch rises over the steps; None where it does not."""
        reading = self.reading()
        if reading is None or not rises(reading.curves[0]):
            return None
        return curve_sentence(reading.curves[0])

    def reading(self) -> CurveReading | None:
        """What the steps so far tell, as `import` tells it; None where they have no number of the mismatch."""
        if not any(name in self._log.series for name in metric_names()):
            return None
        return reading_of_metrics(self._source, self._log)


def reading_of_metrics(source: Path, log: MetricLog) -> CurveReading:
    """What the metrics of a log tell, which has no tokens."""
    return read_curves(
        list(_named_curves(log)),
        tool_version=__version__,
        created_at=environment.utc_now(),
        source=str(source),
        kind=log.kind,
        file_names=[str(file) for file in log.files],
        unknown=sorted(log.unknown),
        notes=log.notes,
    )


def _named_curves(log: MetricLog, last: int | None = None) -> Iterator[NamedCurve]:
    """Each curve in the order of the table of names, its `last` values where that is given. What this tool sent to a
    tracker stands there under the names of other trainers too, and is taken once.
    """
    names = [name for name in metric_names().values() if name.name in log.series]
    own = [name for name in names if name.trainer == OWN_NAMES]
    is_own = any(name.name.startswith("mismatch/") for name in own)
    for name in own if is_own else names:
        series = sorted(log.series[name.name].items())[-(last or 0) :]
        words = metric_words(name.metric) if name.metric in METRICS else quantity_words()[name.metric]
        yield NamedCurve(
            name=name.name,
            trainer=name.trainer,
            metric=name.metric,
            words=words,
            note=name.note,
            source=name.source,
            steps=np.array([step for step, _ in series], np.int64),
            values=np.array([value for _, value in series], np.float64),
        )
