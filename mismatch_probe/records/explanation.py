"""What explains a log: each side set against what every suspected departure from its settings gives."""

from typing import Literal

from mismatch_probe.config.explain import ExplainSettings, LoggedSide
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.summary import Record, Verdict

Part = Literal["weights", "context", "distribution", "log", "format"]


class Departure(Record):
    """One thing that is otherwise than declared: the cause it is, its words, and the parameter that was fitted."""

    part: Part
    code: str
    what: str
    value: float | None = None


class Trial(Record):
    """A hypothesis that was computed.

    departures: none is as declared. explained: the share of the square of the residual as declared that it takes away.
    residual_floors: the root mean square of what it leaves, in units of rounding of tokens of like probability, without
    the largest hundredth. residual_nats: of all, in nats. standard_scores: by how many standard errors its loss is
    below that as declared. Parameters were fitted on other tokens than they are judged on.
    """

    departures: list[Departure]
    explained: float
    residual_floors: float
    residual_nats: float
    standard_scores: float


class SideExplanation(Record):
    """One side of the log.

    trials: as declared first, then the others, best first. left_out: what could not be tried, and why. explained_by:
    the accepted trial, None where nothing explains the side.
    """

    side: LoggedSide
    num_tokens: int
    num_missing: int
    floor_nats: float
    trials: list[Trial]
    left_out: dict[str, str] = {}
    explained_by: Trial | None
    verdict: Verdict


class Explanation(Record):
    """Each logged side, and the verdict on the log: that of the side with the graver one.

    step: of training, whose responses were looked at; None for those of the whole log. model_fingerprint: of the
    checkpoint; empty in records made before it was kept.
    """

    schema_version: int = 1
    tool_version: str
    step: int | None = None
    settings: ExplainSettings
    model_fingerprint: str = ""
    num_responses: int
    num_tokens: int
    sides: list[SideExplanation]
    verdict: Verdict
    seconds: float

    @property
    def fits_the_log(self) -> bool:
        """Whether the checkpoint explains a side, as it is declared or with a departure that is named."""
        return any(side.explained_by is not None for side in self.sides)

    @property
    def exit_code(self) -> ExitCode:
        """What `explain` ends with: data that cannot be explained because it is broken is never a pass."""
        return ExitCode.ENVIRONMENT if self.verdict.kind == "broken" else ExitCode.PASS
