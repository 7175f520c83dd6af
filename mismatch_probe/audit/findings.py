"""What is seen of served tokens, before anything is judged."""

from dataclasses import dataclass
from typing import Literal

from mismatch_probe.audit.asking import ServedResponses
from mismatch_probe.audit.judging import TemperatureFit
from mismatch_probe.audit.scoring import Drawn, Foretold
from mismatch_probe.config.examinations import AuditSettings
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.hypotheses import Context
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.sequences import Floats, Ints


@dataclass(frozen=True)
class ServedSample:
    """The tokens, and how they are said to be sampled."""

    tokens: LoggedTokens
    context: Context
    clusters: Ints
    """The prompt of each token [T]."""
    estimator: Estimator
    law: Distribution | None
    """None of greedy decoding."""
    seeds: list[int] | None
    """Of each token's noise; None where it is not known."""


@dataclass(frozen=True)
class CheckpointView:
    """What the checkpoint in FP32 says."""

    claim: Foretold | None
    """None where no token is named."""
    laws: list[Distribution]
    """That as said, then others; of greedy tokens the one law that they may have been sampled from."""
    draws: Drawn | None
    """Under these laws; None of greedy tokens that show no sampling."""
    temperature: TemperatureFit
    fitted: Foretold | None = None
    """By the law that is likeliest, where tokens are foretold and that law refutes what is said."""
    fitted_p_value: float | None = None
    """That the tokens were drawn from that law; None where no law refutes what is said."""


@dataclass(frozen=True)
class Changed:
    """The checkpoint with weights of fewer bits, or with other prompts."""

    kind: Literal["weights", "prompt"]
    what: str
    foretold: Foretold | None
    draws: Drawn | None
    """Under the law as said."""


@dataclass(frozen=True)
class AuditFindings:
    """Everything that an answer rests on."""

    settings: AuditSettings
    sample: ServedSample
    look: CheckpointView
    in_dtype: Foretold | None
    """The tokens that the checkpoint's own computation in the claimed dtype names."""
    differences: Floats | None
    """Between the scaled logits of the best two tokens in that dtype [T]."""
    changed: list[Changed]
    responses: ServedResponses
