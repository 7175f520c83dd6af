"""The guards of a training run judge the steps of a log, as far as the log has what they read."""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mismatch_probe.arrays import ENOUGH_TOKENS
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.actions import Action, ActionKind, strongest_first
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnosis import Diagnosis, GuardEvent
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.plausible import left_out_sentence
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.sums import Metrics, Sums
from mismatch_probe.importing.following import LoggedStep
from mismatch_probe.importing.selection import Census
from mismatch_probe.logs import Level, LogChecks, LogFinding, is_copied
from mismatch_probe.logs.choices import ChoiceChecks
from mismatch_probe.notation import write_many
from mismatch_probe.records.lines import Contradiction
from mismatch_probe.records.sequences import FloatArray, LoggedResponse, weights_order
from mismatch_probe.stats.copies import CopiedRows, RowCopyTotals, row_totals
from mismatch_probe.stats.growth import ResponseSums, can_show_growth, growth_of_sums
from mismatch_probe.stats.results import LEVEL, StepGrowth
from mismatch_probe.stats.sequences import Sequences, TokenPair, is_usable, of_sampled_tokens
from mismatch_probe.stats.zeros import MOST_LEFT_OUT_OF_A_PASS, LeftOutTotals, sides_without_zeros
from mismatch_probe.verdict.case import where_equal
from mismatch_probe.verdict.growth import growth_sentence

_SIDES = {"log_mu", "log_pi"}
_ENTROPY = "entropy_nats"
_UNITS_ARE_CHECKED = ("like logarithms to", "the most that a vocabulary")
"""Words of the warnings of a batch about units, which the checks of the log report themselves."""
_ENTROPIES_UNUSED = (
    "its entropies are not used: they, or the log-probs of both sides, look like logarithms to another base than e"
)


@dataclass(frozen=True)
class JudgedStep:
    """A step as the guards judged it."""

    number: int
    num_responses: int
    num_tokens: int
    metrics: Metrics
    """The metrics of the step; empty where it could not be judged."""
    events: tuple[GuardEvent, ...]
    findings: tuple[LogFinding, ...]
    """The faults that make the step's numbers doubtful."""
    missing: tuple[str, ...] = ()
    """The metrics that guards read and this step lacks."""
    left_out: LeftOutTotals = field(default_factory=LeftOutTotals)
    """Totals of the tokens without a log-prob."""
    has_faults: bool = False
    """Some of its numbers cannot be log-probs."""
    why_not: str | None = None
    """Why it could not be judged."""
    notes: tuple[str, ...] = ()
    """Other doubts, which no earlier step had."""
    num_rows: int = 0
    """The responses of the step as they were logged, unusable ones too."""
    bounds: tuple[str, ...] = ()
    """Of metrics alone: the metrics that were not logged, of which the least that they can be stands here."""
    contradictions: tuple[Contradiction, ...] = ()
    """Of metrics alone: what the numbers of the steps up to this one contradict, and no earlier step did."""

    @property
    def is_broken(self) -> bool:
        """Whether its numbers are meaningless."""
        return self.has_faults or any(finding.level is Level.BROKEN for finding in self.findings)

    @property
    def is_judged(self) -> bool:
        """Whether every active guard could judge it."""
        return bool(self.metrics) and not self.missing

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions beyond a warning that guards asked for, the strongest first."""
        actions = strongest_first(action for event in self.events for action in event.actions)
        return tuple(action for action in actions if action.kind.strength > ActionKind.WARN.strength)

    @property
    def asks_to_stop(self) -> bool:
        return any(action.kind is ActionKind.STOP for action in self.actions)


class StepWatch:
    """Guards that judge one step after the other."""

    def __init__(self, guards: tuple[GuardSettings, ...]) -> None:
        self._settings = guards
        self._guards = Guards(guards, can={ActionKind.STOP})
        self.num_guards = len(guards)

    @property
    def guards_off(self) -> Mapping[str, tuple[str, ...]]:
        """The guards that are off, and the metrics that each of them lacks."""
        return self._guards.off

    @property
    def fewest_steps(self) -> int:
        """The number of bad steps in a row after which every guard that can ask for more than a warning has asked."""
        active = [
            guard
            for guard in self._settings
            if guard.name not in self.guards_off and _can_ask_for_more_than_a_warning(guard)
        ]
        return max((guard.patience for guard in active), default=1)

    def growth(self) -> StepGrowth | None:
        """How the KL grows over the judged steps, by the test that `report` has for its headline."""
        return None

    @property
    def can_show_growth(self) -> bool:
        """Whether the judged steps have enough responses to show a growth."""
        return False

    def warning(self) -> str | None:
        """How the mismatch rises over the steps; None where it does not."""
        growth = self.growth()
        return None if growth is None else growth_sentence(growth)

    def diagnosis(self) -> Diagnosis:
        """The likely cause of the guards' last findings."""
        return self._guards.diagnosis()


class Watch(StepWatch):
    """Judges the steps of a log; the first step decides which guards can judge it."""

    def __init__(self, guards: tuple[GuardSettings, ...]) -> None:
        super().__init__(guards)
        self._earlier_notes: set[str] = set()
        self._sums: list[ResponseSums] = []

    def judge(self, step: LoggedStep) -> JudgedStep:
        """
        Raises:
            UsageError: the log gives what no guard reads.
        """
        checks, choice_checks = LogChecks(), ChoiceChecks()
        for response in step.responses:
            checks.add(response)
            choice_checks.add(response)
        all_findings = (*step.findings, *checks.findings(), *choice_checks.findings())
        findings = [finding for finding in all_findings if finding.level is not Level.NOTE]
        missing_names = checks.missing_numbers().keys()
        is_meaningless = missing_names & _SIDES or any(finding.level is Level.BROKEN for finding in findings)
        usable = [] if is_meaningless else [response for response in step.responses if response.sampled.any()]
        copies = checks.copies().get("log_pi")
        copied_responses = (
            [] if copies is None else [response for response in usable if _is_copied_response(response, copies.rows)]
        )
        sums, notes = Sums(), []
        if usable:
            entropies = None if _ENTROPY in missing_names else _usable_entropies(usable)
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always")
                sums = _sum_step(usable, copied_responses, entropies)
            is_unused = entropies is not None and sums.compared > 0 and not sums.with_entropy
            notes = [*_new_warnings(messages), *([_ENTROPIES_UNUSED] if is_unused else [])]
        new = tuple(note for note in notes if note not in self._earlier_notes)
        self._earlier_notes.update(new)
        why_not = _why_not_judged(sums) if usable else _why_nothing_is_usable(step.responses)
        result = JudgedStep(
            step.number,
            len(usable or step.responses),
            int(sums.tokens),
            {},
            (),
            tuple(findings),
            left_out=sums.left_out,
            has_faults=sums.faults > 0,
            why_not=why_not,
            notes=new,
            num_rows=len(step.responses),
        )
        if why_not is not None:
            return result
        metrics = sums.metrics() | dict(_of_choices(choice_checks))
        if not sums.faults:
            self._sums += _k3_sums(step.number, usable, copied_responses)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `off` is shown instead
            decision = self._guards.judge(step.number, metrics, canary=False)
        if len(self.guards_off) == self.num_guards:
            raise UsageError(
                f"the log gives {', '.join(sorted(metrics))}, and no guard reads any of it; give --guards a file "
                "with guards on these"
            )
        return replace(result, metrics=metrics, events=decision.events, missing=decision.firings.missing)

    def growth(self) -> StepGrowth | None:
        return growth_of_sums(ResponseSums.join(self._sums), LEVEL) if self._sums else None

    @property
    def can_show_growth(self) -> bool:
        if not self._sums:
            return False
        sums = ResponseSums.join(self._sums)
        return can_show_growth(sums.steps, sums.prompts)


def _of_choices(checks: ChoiceChecks) -> Iterator[tuple[str, float]]:
    """The metrics of a step of what a trainer can replay; none where the log records no choices."""
    if (experts := checks.expert_reading()) is not None:
        yield "replay/expert_coverage", experts.coverage
    if (sets := checks.kept_reading()) is not None:
        yield "replay/kept_coverage", sets.coverage
        yield "replay/kept_agreement", sets.agreement


def _new_warnings(messages: Sequence[warnings.WarningMessage]) -> Iterator[str]:
    """The warnings of the batch of a step that the checks of the log do not report themselves."""
    for text in (str(warning.message) for warning in messages):
        if not any(words in text for words in _UNITS_ARE_CHECKED):
            yield text


def _can_ask_for_more_than_a_warning(guard: GuardSettings) -> bool:
    kinds = (action.kind for answer in guard.actions for action in answer)
    return any(kind.strength > ActionKind.WARN.strength for kind in kinds)


def _why_nothing_is_usable(responses: Sequence[LoggedResponse]) -> str:
    if not any(response.sampled.any() for response in responses):
        return "none of its tokens counts as sampled: it is empty, or its masks are 0 throughout"
    return "it lacks the log-probs of a side, or its numbers mean nothing"


def _why_not_judged(sums: Sums) -> str | None:
    """Why a step cannot be judged from its numbers; None where it can."""
    if sums.faults:
        return None
    if not sums.left_out.are_few:
        return left_out_sentence(sums.left_out)
    if sums.is_copied:
        return f"one side is a copy of the other: equal bit for bit {where_equal(sums.copies)}"
    num_tokens = int(sums.tokens - sums.left_out.out)
    if num_tokens < ENOUGH_TOKENS:
        return f"{write_many(num_tokens, 'token')} with log-probs of both sides, where {ENOUGH_TOKENS} are the fewest"
    return None


def _is_copied_response(response: LoggedResponse, copies: CopiedRows) -> bool:
    log_pi, log_mu, is_sampled = response.log_pi, response.log_mu, response.sampled
    return log_pi is not None and log_mu is not None and is_copied(log_pi[is_sampled], log_mu[is_sampled], copies)


def _sum_step(
    responses: Sequence[LoggedResponse], copied_responses: Sequence[LoggedResponse], entropies: list[FloatArray] | None
) -> Sums:
    """Sum a step; `copied_responses` are the responses whose log-probs of pi are copies and measure nothing."""
    census, places = Census(), {id(response) for response in copied_responses}
    end_reasons = [response.finish_reason for response in responses]
    sums = Batch(
        [_values_or_nan(response, None if id(response) in places else response.log_pi) for response in responses],
        [_values_or_nan(response, response.log_mu) for response in responses],
        [response.sampled for response in responses],
        entropy=entropies,
        prompt_ids=list(map(census.cluster_of, [census.add(response) for response in responses])),
        truncated=[reason == "length" for reason in end_reasons] if all(end_reasons) else None,
    ).measure()
    return replace(sums, rows=sums.rows + _totals_of_copies(copied_responses))


def _k3_sums(
    step: int, responses: Sequence[LoggedResponse], copied_responses: Sequence[LoggedResponse]
) -> Iterator[ResponseSums]:
    """Of the responses of a step that the newest weights sampled, so that staleness is no growth; none without a
    usable token.
    """
    copied = {id(response) for response in copied_responses}
    newest = max((weights_order(response.weight_version) for response in responses), default=None)
    recent_responses = [
        (response, response.log_pi, response.log_mu)
        for response in responses
        if id(response) not in copied and weights_order(response.weight_version) == newest
    ]
    rows = [
        (each, pi[each.sampled], mu[each.sampled])
        for each, pi, mu in recent_responses
        if pi is not None and mu is not None and each.sampled.any()
    ]
    if not rows:
        return
    log_pi, log_mu = np.concatenate([pi for _, pi, _ in rows]), np.concatenate([mu for _, _, mu in rows])
    sequences = Sequences.of_lengths([pi.size for _, pi, _ in rows], [_cluster_number(each) for each, _, _ in rows])
    log_pi, log_mu = sides_without_zeros(log_pi, of_sampled_tokens(log_mu), sequences.offsets)
    usable = is_usable(log_pi) & is_usable(log_mu)
    part = sequences.of_usable_tokens(usable)
    if part is not None:
        pair = TokenPair(part, log_pi[usable], log_mu[usable])
        yield ResponseSums.of(pair, np.full(part.num_sequences, step))


def _cluster_number(response: LoggedResponse) -> int:
    """Of the responses of a step that belong together: a hash of their group, or of their prompt."""
    text = str(response.group).encode() if response.group is not None else response.prompt_token_ids.tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


def _totals_of_copies(copied_responses: Sequence[LoggedResponse]) -> RowCopyTotals:
    if not copied_responses:
        return RowCopyTotals()
    masks = [response.sampled for response in copied_responses]
    sides = zip(*((response.log_pi, response.log_mu) for response in copied_responses), strict=True)
    log_pi, log_mu = (np.concatenate([row[of] for row, of in zip(side, masks, strict=True)]) for side in sides)
    rows = np.repeat(np.arange(len(copied_responses)), [of.sum() for of in masks])
    return RowCopyTotals.of(row_totals(log_pi, log_mu, rows, len(copied_responses)))


def _values_or_nan(response: LoggedResponse, values: FloatArray | None) -> FloatArray:
    return np.full(response.token_ids.size, np.nan) if values is None else values


def _usable_entropies(responses: Sequence[LoggedResponse]) -> list[FloatArray] | None:
    """The entropies; None where too many tokens lack one: what needs no entropy is then still measured."""
    entropies = [_values_or_nan(response, response.entropy_nats) for response in responses]
    sampled_values = [values[response.sampled] for values, response in zip(entropies, responses, strict=True)]
    absent = np.isnan(np.concatenate(sampled_values)).mean()
    return entropies if absent <= MOST_LEFT_OUT_OF_A_PASS else None
