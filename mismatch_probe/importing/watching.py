"""The guards of a training run on the steps of a log: what they say, and which of them a log cannot serve."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.decision import GuardEvent
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.diagnosis import Diagnosis
from mismatch_probe.guards.mismatch import Metrics, mismatch_metrics
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.importing.census import Census
from mismatch_probe.importing.following import LoggedStep
from mismatch_probe.logs import Level, LogChecks, LogFinding
from mismatch_probe.records.logged import LoggedResponse
from mismatch_probe.stats.sequences import Floats

_REMEMBERED_STEPS = 16
_SIDES = {"log_mu", "log_pi"}
_ENTROPY = "entropy_nats"


@dataclass(frozen=True)
class JudgedStep:
    """A step as the guards saw it. findings: what makes the log's numbers of it doubtful; metrics are empty where it
    could not be judged. missing: metrics that guards read and this step lacks.
    """

    number: int
    num_responses: int
    num_tokens: int
    metrics: Metrics
    events: tuple[GuardEvent, ...]
    findings: tuple[LogFinding, ...]
    missing: tuple[str, ...] = ()

    @property
    def is_broken(self) -> bool:
        """Whether its numbers mean nothing, or some of them are none."""
        has_none = self.metrics.get("mismatch/nonfinite_tokens", 0) > 0
        return has_none or any(finding.level is Level.BROKEN for finding in self.findings)

    @property
    def asks_to_stop(self) -> bool:
        return any(action.kind is ActionKind.STOP for event in self.events for action in event.actions)


@dataclass
class Watch:
    """Judges the steps of a log. off: the guards that are off, and the metrics that each lacks."""

    guards: tuple[GuardSettings, ...]
    off: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _book: GuardBook | None = None
    _history: dict[int, Metrics] = field(default_factory=dict)
    _events: list[GuardEvent] = field(default_factory=list)

    def judge(self, step: LoggedStep) -> JudgedStep:
        """
        Raises:
            UsageError: the log gives what no guard reads.
        """
        checks = LogChecks()
        for response in step.responses:
            checks.add(response)
        findings = [finding for finding in (*step.told, *checks.findings()) if finding.level is not Level.NOTE]
        unrecorded = checks.unrecorded().keys()
        means_nothing = unrecorded & _SIDES or any(finding.level is Level.BROKEN for finding in findings)
        usable = [] if means_nothing else _sampled(step.responses)
        if not usable:
            return JudgedStep(step.number, len(step.responses), 0, {}, (), tuple(findings))
        metrics = _metrics(usable, with_entropy=_ENTROPY not in unrecorded)
        said = self._opened(metrics).evaluate(step.number, metrics)
        self._history[step.number] = metrics
        self._history = dict(sorted(self._history.items())[-_REMEMBERED_STEPS:])
        self._events += said.events
        num_tokens = sum(int(response.sampled.sum()) for response in usable)
        return JudgedStep(step.number, len(usable), num_tokens, metrics, said.events, tuple(findings), said.missing)

    def diagnosis(self) -> Diagnosis:
        """The likely cause of what the guards said last."""
        return diagnose(self._history, self._events)

    def _opened(self, metrics: Collection[str]) -> GuardBook:
        """The guards that the log can serve, chosen at its first step."""
        if self._book is None:
            self.off = {guard.name: lacking for guard in self.guards if (lacking := _lacking(guard, metrics))}
            on = tuple(guard for guard in self.guards if guard.name not in self.off)
            if not on:
                raise UsageError(
                    f"the log gives {', '.join(sorted(metrics))}, and no guard reads any of it; give --guards a file "
                    "with guards on these"
                )
            self._book = GuardBook(on)
        return self._book


def _lacking(guard: GuardSettings, metrics: Collection[str]) -> tuple[str, ...]:
    absent = tuple(name for name in guard.metrics if name not in metrics)
    return absent or tuple(f"a canary's {name}" for name in guard.canary_metrics)


def _sampled(responses: Sequence[LoggedResponse]) -> list[LoggedResponse]:
    """Those with both sides' log-probs and a token that the policy sampled."""
    return [
        response
        for response in responses
        if response.log_mu is not None and response.log_pi is not None and response.sampled.any()
    ]


def _metrics(responses: Sequence[LoggedResponse], *, with_entropy: bool) -> Metrics:
    census = Census()
    prompts = [census.add(response) for response in responses]
    lengths = [int(response.sampled.sum()) for response in responses]
    has_entropy = with_entropy and all(response.entropy_nats is not None for response in responses)
    metrics = mismatch_metrics(
        lengths,
        prompts,
        _flat(responses, "log_mu"),
        _flat(responses, "log_pi"),
        _flat(responses, _ENTROPY) if has_entropy else None,
    )
    metrics |= {"response/length_mean": float(np.mean(lengths)), "response/length_max": float(np.max(lengths))}
    if all(response.finish_reason for response in responses):
        truncated = [response.finish_reason == "length" for response in responses]
        metrics["response/truncated_share"] = float(np.mean(truncated))
    return metrics


def _flat(responses: Sequence[LoggedResponse], column: str) -> Floats:
    return np.concatenate(
        [np.asarray(getattr(response, column), dtype=np.float64)[response.sampled] for response in responses]
    )
