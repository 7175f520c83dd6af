"""The guards of a training run on the steps of a log: what they say, and which of them a log cannot serve."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.actions import Action, ActionKind, strongest_first
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.decision import GuardEvent
from mismatch_probe.guards.diagnosis import Diagnosis
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.importing.census import Census
from mismatch_probe.importing.following import LoggedStep
from mismatch_probe.logs import Level, LogChecks, LogFinding, is_copy
from mismatch_probe.records.logged import LoggedResponse

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
    def is_judged(self) -> bool:
        """Whether every guard that is on could judge it."""
        return bool(self.metrics) and not self.missing

    @property
    def asked(self) -> tuple[Action, ...]:
        """What guards asked for beyond a warning, the strongest first."""
        actions = strongest_first(action for event in self.events for action in event.actions)
        return tuple(action for action in actions if action.kind.strength > ActionKind.WARN.strength)

    @property
    def asks_to_stop(self) -> bool:
        return any(action.kind is ActionKind.STOP for action in self.asked)


class Watch:
    """Judges the steps of a log; which guards it can serve is told by its first step."""

    def __init__(self, guards: tuple[GuardSettings, ...]) -> None:
        self._guards = Guards(guards, can={ActionKind.STOP})
        self.num_guards = len(guards)

    @property
    def off(self) -> Mapping[str, tuple[str, ...]]:
        """The guards that are off, and the metrics that each lacks."""
        return self._guards.off

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
        copies = {column: copied.fewest for column, copied in checks.copies().items() if column in _SIDES}
        usable = [] if means_nothing else _sampled(step.responses, copies.get("log_pi"))
        if not usable:
            return JudgedStep(step.number, len(step.responses), 0, {}, (), tuple(findings))
        metrics = _metrics(usable, with_entropy=_ENTROPY not in unrecorded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `off` is shown instead
            decision = self._guards.judge(step.number, metrics, canary=False)
        if len(self.off) == self.num_guards:
            raise UsageError(
                f"the log gives {', '.join(sorted(metrics))}, and no guard reads any of it; give --guards a file "
                "with guards on these"
            )
        num_tokens = sum(int(response.sampled.sum()) for response in usable)
        missing = decision.firings.missing
        return JudgedStep(step.number, len(usable), num_tokens, metrics, decision.events, tuple(findings), missing)

    def diagnosis(self) -> Diagnosis:
        """The likely cause of what the guards said last."""
        return self._guards.diagnosis()


def _sampled(responses: Sequence[LoggedResponse], fewest_copied: int | None) -> list[LoggedResponse]:
    """Those with both sides' log-probs, neither a copy of the other, and a token that the policy sampled."""
    return [
        response
        for response in responses
        if response.log_mu is not None
        and response.log_pi is not None
        and response.sampled.any()
        and not (
            fewest_copied is not None
            and is_copy(response.log_pi[response.sampled], response.log_mu[response.sampled], fewest_copied)
        )
    ]


def _metrics(responses: Sequence[LoggedResponse], *, with_entropy: bool) -> Metrics:
    census = Census()
    has_entropy = with_entropy and all(response.entropy_nats is not None for response in responses)
    ended = [response.finish_reason for response in responses]
    batch = Batch(
        [response.log_pi for response in responses],
        [response.log_mu for response in responses],
        [response.sampled for response in responses],
        entropy=[response.entropy_nats for response in responses] if has_entropy else None,
        prompt_ids=list(map(census.cluster_of, [census.add(response) for response in responses])),
        truncated=[reason == "length" for reason in ended] if all(ended) else None,
    )
    return batch.measure().metrics()
