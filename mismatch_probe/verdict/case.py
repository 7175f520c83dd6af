"""What a verdict is reached from: the numbers of one pair, the FP32 pair beside it, and what really ran."""

from dataclasses import dataclass, field

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import Cause, Counts, SettingFinding
from mismatch_probe.stats.results import Blame, Estimate, FewTokens, LengthLaw
from mismatch_probe.verdict.departures import Departures
from mismatch_probe.verdict.ids import IdsFound
from mismatch_probe.verdict.signatures.disagreement import Disagreement


@dataclass(frozen=True)
class Case:
    """One pair. `exact` is the pair that differs from it in its dtypes alone, FP32 on both sides (this pair itself
    where it is that), None where it was not run or not usable; `disagreement` is None where nothing was usable.

    name: of the training side and of the engine's. exact_name: the same of the FP32 pair. exact_sides: flags that give
    the same two sides in FP32. can_be_looked_into: `localize` and `headroom` can, as both sides load the run's
    checkpoint and no adapter.
    `applied_train` and `applied_infer` were read back from the loaded model and the running engine. `takes_dtypes`:
    whether the run can be given an FP32 pair later; one with another run's responses cannot. legs_say_whose_they_are:
    and were found to be the run's own. has_run: there is a run that a command can go on from. is_logged: both sides are
    those of a log. is_of_server: its responses are a server's, whose weights nobody has read. is_of_log: they are a
    log's. departures: how far the log's sides lie from the reference. log_faults: what makes its numbers mean nothing.
    """

    name: tuple[str, str]
    train_dtype: Dtype
    infer_dtype: Dtype
    applied_train: str | None
    applied_infer: str | None
    counts: Counts
    metrics: dict[str, Estimate]
    length: LengthLaw | None
    blame: Blame | None
    disagreement: Disagreement | None
    exact: Disagreement | None
    ids: IdsFound | None = None
    preflight: list[SettingFinding] = field(default_factory=list)
    legs_say_whose_they_are: bool = False
    takes_dtypes: bool = True
    exact_name: tuple[str, str] | None = None
    exact_sides: tuple[str, ...] = ()
    can_be_looked_into: bool = True
    has_run: bool = True
    few_tokens: FewTokens | None = None
    is_logged: bool = False
    is_of_server: bool = False
    is_of_log: bool = False
    departures: Departures | None = None
    log_faults: list[Cause] = field(default_factory=list)
    left_out: frozenset[str] = frozenset()
    """Sides of the run that the engine cannot compute, by name."""
    fp16_refused: str | None = None
    """Why the engine cannot compute in FP16, where no side was asked for in it."""

    @property
    def is_of_dtypes(self) -> bool:
        """Whether nothing is said of the sides but their dtypes."""
        return self.name == (self.train_dtype, self.infer_dtype)
