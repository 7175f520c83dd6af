"""What lies in a run's folder beside its own records: what other commands said of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from mismatch_probe.records.evaluation import Evaluation, EvaluationDirectory
from mismatch_probe.records.findings import Document, Findings, file_name
from mismatch_probe.records.gate_result import GATE_FILE, GateResult, answer_of
from mismatch_probe.records.kinds import EVALUATION


@dataclass(frozen=True)
class Filed:
    """Results of `headroom`, `localize` and `explain`, what the responses earned, and what a gate said."""

    findings: Sequence[Document] = ()
    evaluation: Evaluation | None = None
    gate: GateResult | None = None

    @classmethod
    def of(cls, run: Path) -> Self:
        """All there is; an evaluation only where it is finished.

        Raises:
            BrokenRecord: a document is damaged, or of another version.
        """
        directory = EvaluationDirectory(run)
        evaluation = directory.read_evaluation() if directory.evaluation_path.exists() else None
        is_finished = evaluation is not None and evaluation.state == "finished"
        return cls(Findings(run).documents(), evaluation if is_finished else None, answer_of(run))

    @property
    def names(self) -> list[str]:
        """Of the files that it was read from."""
        names = [file_name(document) for document in self.findings]
        names += [] if self.evaluation is None else [EVALUATION]
        return names + ([] if self.gate is None else [GATE_FILE])


NOTHING_FILED: Final = Filed()
