"""`evaluation.json`: accuracy under mu and under pi, and what deployment gains or loses."""

from pathlib import Path
from typing import Literal

from mismatch_probe.config.model import EvaluationSettings
from mismatch_probe.config.sides import Side, SideName
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.kinds import EVALUATION
from mismatch_probe.records.manifest import read_document, write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import OfSides, Record
from mismatch_probe.stats.results import Estimate


class EngineAccuracy(OfSides):
    """What responses of an engine's side earn on average."""

    infer: SideName
    infer_dtype: Dtype
    accuracy: Estimate
    truncated_responses: int


class EngineDifference(Record):
    """Accuracy of the engine's side `of` minus that of `over`, on the same problems."""

    of: SideName
    over: SideName
    difference: Estimate


class DirectAccuracy(Record):
    """What responses sampled on the training path earn;"""

    accuracy: Estimate
    gap: Estimate
    """That minus accuracy under mu, on the same problems."""
    truncated_responses: int


class PairAccuracy(OfSides):
    """The deployment gap of a pair of sides."""

    train: SideName
    infer: SideName
    train_dtype: Dtype
    infer_dtype: Dtype
    under_mu: Estimate | None
    """Of the responses that both sides scored."""
    ess: Estimate | None
    under_pi: Estimate | None
    """Of the same ones, each weighing pi/mu."""
    gap: Estimate | None
    """`under_pi` minus `under_mu`, positive where deployment loses. Both are None where ess, the share of the responses
    that the weights leave, is too small, which `undecided` says.
    """
    responses_left_out: int
    undecided: str | None = None
    direct: DirectAccuracy | None = None
    """From responses of pi itself, where asked for."""


class Evaluation(Record):
    """The whole answer; the lists are empty until everything is sampled and scored."""

    evaluation_version: int = 1
    tool_version: str
    model: str
    model_fingerprint: str
    task: str
    settings: EvaluationSettings
    state: Literal["unfinished", "finished"] = "unfinished"
    engines: list[EngineAccuracy] = []
    differences: list[EngineDifference] = []
    pairs: list[PairAccuracy] = []


class EvaluationDirectory(RunDirectory):
    """A comparison's directory with the evaluation's own files."""

    @property
    def evaluation_path(self) -> Path:
        return self.path / EVALUATION

    def pi_rollouts_path(self, pi: Side) -> Path:
        return self.path / f"rollouts-{pi.sampler}.parquet"

    def write_evaluation(self, evaluation: Evaluation) -> None:
        write_document(self.evaluation_path, evaluation)

    def read_evaluation(self) -> Evaluation:
        return read_document(
            self.evaluation_path,
            Evaluation,
            missing="no evaluation was started here; give another --out",
            fix="evaluate again",
        )
