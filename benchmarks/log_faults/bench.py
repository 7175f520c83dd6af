"""A model with the responses that vLLM sampled from it, and logs of them with a fault on one side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fault_lab.recording import OpenScorer
from mismatch_probe.config.model import ExplainSettings, LoggedSide, ModelSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import FloatArray, LoggedResponse, TokenSequence
from mismatch_probe.records.tables import read_table, sequences_of
from mismatch_probe.training_path import plan_batches

Columns = list[FloatArray]
EditLog = Callable[[list[TokenSequence]], list[TokenSequence]]


@dataclass(frozen=True)
class Bench:
    """dtype: of both sides. mu is what vLLM recorded as it sampled, pi what the training path scores, ref its FP32.

    is_exact: faults are computed in FP32, and pi is ref: what a fault does without rounding.
    """

    model: str
    checkpoint: Path
    run: RunDirectory
    scratch: Path
    dtype: Dtype
    is_exact: bool = False

    @property
    def arithmetic(self) -> Dtype:
        return Dtype.FP32 if self.is_exact else self.dtype

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """The responses that the engine sampled in this format, in the order of their prompts."""
        sampler = f"@infer-{self.dtype}"
        return [item for item in sequences_of(read_table(self.run.rollouts_path)) if item.id.endswith(sampler)]

    @cached_property
    def mu(self) -> Columns:
        return self._leg(f"infer-{self.dtype}-decode")

    @cached_property
    def pi(self) -> Columns:
        return self.ref if self.is_exact else self._leg(f"train-{self.dtype}")

    @cached_property
    def ref(self) -> Columns:
        settings = self.run.read_manifest().settings
        reference = settings.reference_of(settings.pi(self.dtype))
        assert reference is not None
        return self._leg(reference.leg())

    def scored(self, open_scorer: OpenScorer, edit: EditLog | None = None) -> Columns:
        """The responses scored by a training path that a fault opens, in the contexts that `edit` gives them."""
        sequences = self.sequences if edit is None else edit(self.sequences)
        logprobs_of_rows: dict[int, FloatArray] = {}
        with open_scorer(self.arithmetic, False) as side:
            for batch in plan_batches([sequence.num_tokens for sequence in sequences], 2048):
                scored = side.score([sequences[row] for row in batch])
                logprobs_of_rows |= {
                    row: response.logprobs.astype(np.float64) for row, response in zip(batch, scored, strict=True)
                }
        return [logprobs_of_rows[row] for row in range(len(sequences))]

    def log(self, side: LoggedSide, columns: Columns) -> list[LoggedResponse]:
        """One side as it is, the other faulty."""
        mu, pi = (columns, self.pi) if side == "mu" else (self.mu, columns)
        return logged(self.sequences, mu, pi)

    def settings(self, **others: Any) -> ExplainSettings:
        declared = {"dtype": self.dtype}
        return ExplainSettings.model_validate(
            {"model": ModelSettings(path=str(self.checkpoint)), "mu": declared, "pi": declared, **others}
        )

    def _leg(self, name: str) -> Columns:
        legs = Legs(self.run, self.run.read_manifest().run_key)
        rows = {row["id"]: np.asarray(row["logprobs"], dtype=np.float64) for row in legs.read(name).to_pylist()}
        return [rows[sequence.id] for sequence in self.sequences]


def logged(sequences: Sequence[TokenSequence], mu: Columns, pi: Columns) -> list[LoggedResponse]:
    return [
        LoggedResponse(
            where=sequence.id,
            prompt_token_ids=np.array(sequence.prompt_token_ids, dtype=np.int32),
            token_ids=np.array(sequence.token_ids, dtype=np.int32),
            sampled=np.ones(len(sequence.token_ids), dtype=np.bool_),
            log_mu=mu[number],
            log_pi=pi[number],
        )
        for number, sequence in enumerate(sequences)
    ]
