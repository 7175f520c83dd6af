"""What `evaluate` asks beyond a comparison: what an answer is worth, and whether pi samples too."""

from mismatch_probe.config.model import Settings


class EvaluationSettings(Settings):
    """reward: as task.reward of training. sample_pi: responses are sampled on the training path as well."""

    reward: str | None = None
    sample_pi: bool = False
