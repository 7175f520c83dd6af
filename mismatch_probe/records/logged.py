"""What a log of another system says of one response."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mismatch_probe.records.sequences import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True)
class LoggedResponse:
    """One response as it was logged. Arrays [T] run over the response's tokens; log-probs are in nats.

    where: it was read from, `line 3 of FILE`. sampled [T]: the token was sampled by the policy, not written by a tool
    or a template. log_mu is the sampler's, log_pi the trainer's, log_ref that of a reference policy: None where the
    log has no such column, NaN where it has no number for a token. step: of training. weight_version: of the weights
    that sampled it. group: what the responses to one prompt have in common, None where the log does not say. model:
    its name, where the log has one beside the version of its weights. num_padding: tokens of padding that the log has
    around it, and that are left out here.
    """

    where: str
    prompt_token_ids: IntArray
    token_ids: IntArray
    sampled: npt.NDArray[np.bool_]
    log_mu: FloatArray | None = None
    log_pi: FloatArray | None = None
    log_ref: FloatArray | None = None
    entropy_nats: FloatArray | None = None
    step: int | None = None
    weight_version: str | None = None
    temperature: float | None = None
    group: str | None = None
    finish_reason: str | None = None
    model: str | None = None
    num_padding: int = 0
