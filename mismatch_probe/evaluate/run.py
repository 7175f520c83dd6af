"""An evaluation: a comparison's stages, pi's own responses where requested, then what the responses earned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe import __version__
from mismatch_probe.compare.plan import AnyEvent
from mismatch_probe.compare.preparation import Preparation, prepare
from mismatch_probe.compare.run import execute, resume_run, start_run
from mismatch_probe.compare.run_reader import RunReader
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.model import EvaluationSettings
from mismatch_probe.evaluate.estimates import (
    Answers,
    Marker,
    accuracy,
    accuracy_difference,
    reweight,
    sample_training_path,
)
from mismatch_probe.records.answers import (
    DirectAccuracy,
    EngineAccuracy,
    EngineDifference,
    Evaluation,
    EvaluationDirectory,
    PairAccuracy,
)
from mismatch_probe.records.legs import read_prompts
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.tables import prompts_of, read_table
from mismatch_probe.tasks import Asking, load_prompts, load_tokenizer
from mismatch_probe.tasks.rewards import Reward, load_reward

DEFAULTS: Final[Mapping[str, Any]] = {
    "prompts": {"source": "sums:medium"},
    "sampling": {"samples_per_prompt": 4},
    "engine": {"prefill": False},
    "reference": {"rounded_weights": False},
    "floors": {"num_sequences": 0},
    "full_vocabulary": {"positions": 0},
}
"""Where an evaluation starts from, instead of a comparison's own defaults."""

_ASKING: Final = Asking("--task", "--num-problems", default_made=256, default_held=256)


@dataclass(frozen=True)
class EvaluationPreparation:
    """An evaluation ready to start."""

    comparison: Preparation
    settings: EvaluationSettings
    reward: Reward

    def record(self) -> Evaluation:
        """What is known before anything is sampled."""
        manifest = self.comparison.manifest
        return Evaluation(
            tool_version=__version__,
            model=manifest.model.name,
            model_fingerprint=manifest.model.fingerprint,
            task=manifest.settings.prompts.source,
            settings=self.settings,
        )


def prepare_evaluation(comparison: CompareSettings, settings: EvaluationSettings) -> EvaluationPreparation:
    """Resolve and check everything that can be checked without a model in memory."""
    prompts = load_prompts(comparison.prompts, comparison.sampling.seed, _ASKING)
    reward = load_reward(settings.reward, prompts)
    prompt_settings = comparison.prompts.model_copy(update={"num_prompts": len(prompts)})
    comparison = comparison.model_copy(update={"prompts": prompt_settings})
    return EvaluationPreparation(prepare(comparison), settings, reward)


def default_evaluation_path() -> Path:
    return Path("runs") / f"evaluate-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def start_evaluation(path: Path, preparation: EvaluationPreparation) -> EvaluationDirectory:
    """Make the run directory."""
    run = EvaluationDirectory(path)
    start_run(path, preparation.comparison, lambda _: run.write_evaluation(preparation.record()))
    return run


def resume_evaluation(path: Path, preparation: EvaluationPreparation) -> EvaluationDirectory:
    """Open a run to continue it; the reward and whether pi samples too may be others."""
    resume_run(path, preparation.comparison)
    run = EvaluationDirectory(path)
    run.write_evaluation(preparation.record())
    return run


def execute_evaluation(
    run: EvaluationDirectory, preparation: EvaluationPreparation, listener: Callable[[AnyEvent], None]
) -> Evaluation:
    """Sample and score what is not recorded yet, then evaluate."""
    execute(run, listener)
    with run.lock():
        manifest = run.read_manifest()
        prompts = prompts_of(read_prompts(run, manifest.run_key))
        tokenizer = load_tokenizer(manifest.model.folder, trust_remote_code=manifest.settings.model.trust_remote_code)
        if preparation.settings.sample_pi:
            sample_training_path(run, manifest, prompts, tokenizer, listener)
        marker = Marker(prompts, tokenizer, preparation.reward)
        evaluation = evaluate_records(run, manifest, marker, preparation.record())
        run.write_evaluation(evaluation)
    return evaluation


def evaluate_records(run: EvaluationDirectory, manifest: Manifest, marker: Marker, record: Evaluation) -> Evaluation:
    """`record` with every accuracy, from the files of a run; needs no accelerator."""
    level = manifest.settings.confidence
    rollouts = read_table(run.rollouts_path)
    sides = manifest.settings.infer_sides
    tables = {mu.name: rollouts.filter(pc.equal(rollouts["sampler"], mu.sampler)) for mu in sides}
    marks = {infer: marker.mark(table) for infer, table in tables.items()}
    direct = _direct(run, manifest, marker) if record.settings.sample_pi else {}
    reader = RunReader(run, manifest)
    return record.model_copy(
        update={
            "state": "finished",
            "engines": [
                EngineAccuracy(
                    infer=infer,
                    infer_dtype=manifest.settings.mu(infer).dtype,
                    accuracy=accuracy(answers, level),
                    truncated_responses=_num_truncated(tables[infer]),
                )
                for infer, answers in marks.items()
            ],
            "differences": [
                EngineDifference(of=of, over=other, difference=accuracy_difference(marks[of], marks[other], level))
                for of, other in combinations(marks, 2)
            ],
            "pairs": [
                _pair(reader, manifest.settings, pair, marks[pair[1]], direct.get(pair[0]))
                for pair in manifest.settings.pairs
            ],
        }
    )


def _pair(
    reader: RunReader, settings: CompareSettings, name: PairName, answers: Answers, direct: tuple[Answers, int] | None
) -> PairAccuracy:
    data, level = reader.pair(name), settings.confidence
    both = answers.at(data.rows)
    under_pi = None if data.pair is None else reweight(both, data.pair.diff_sums, level)
    return PairAccuracy(
        train=name[0],
        infer=name[1],
        train_dtype=settings.pi(name[0]).dtype,
        infer_dtype=settings.mu(name[1]).dtype,
        under_mu=None if data.pair is None else accuracy(both, level),
        ess=None if under_pi is None else under_pi.ess,
        under_pi=None if under_pi is None else under_pi.under_pi,
        gap=None if under_pi is None else under_pi.gap,
        responses_left_out=len(answers.rewards) - len(data.rows),
        undecided="no response has finite log-probs on both sides" if under_pi is None else under_pi.undecided,
        direct=None
        if direct is None
        else DirectAccuracy(
            accuracy=accuracy(direct[0], level),
            gap=accuracy_difference(direct[0], answers, level),
            truncated_responses=direct[1],
        ),
    )


def _direct(run: EvaluationDirectory, manifest: Manifest, marker: Marker) -> dict[str, tuple[Answers, int]]:
    """What pi's own responses earned and how many were truncated, by the side's name."""
    tables = {pi.name: read_table(run.pi_rollouts_path(pi)) for pi in manifest.settings.train_sides}
    return {name: (marker.mark(table), _num_truncated(table)) for name, table in tables.items()}


def _num_truncated(table: pa.Table) -> int:
    return int(np.sum(np.asarray(table["finish_reason"].to_pylist()) == "length"))
