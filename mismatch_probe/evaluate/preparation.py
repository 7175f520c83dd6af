"""What is evaluated: a comparison of the task's prompts without what only the mismatch's causes need."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from mismatch_probe import __version__
from mismatch_probe.compare.preparation import Preparation, prepare
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.evaluate import EvaluationSettings
from mismatch_probe.records.evaluation import Evaluation
from mismatch_probe.tasks import Asking, load_prompts
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

_ASKING: Final = Asking("--task", "--num-problems", made=256, held=256)


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
    """Resolve and check everything that can be checked without a model in memory.

    Raises:
        UsageError: the checkpoint, the task, the reward or the settings cannot be used.
        MissingExtra: a needed package is not installed.
        EngineError: the engine cannot be configured here.
    """
    prompts = load_prompts(comparison.prompts, comparison.sampling.seed, _ASKING)
    reward = load_reward(settings.reward, prompts)
    resolved = comparison.prompts.model_copy(update={"num_prompts": len(prompts)})
    comparison = comparison.model_copy(update={"prompts": resolved})
    return EvaluationPreparation(prepare(comparison), settings, reward)


def default_evaluation_path() -> Path:
    return Path("runs") / f"evaluate-{datetime.now(UTC):%Y%m%d-%H%M%S}"
