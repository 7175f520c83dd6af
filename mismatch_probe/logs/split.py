"""Prompt and response of a row that holds both in one list of tokens."""

import numpy as np
import numpy.typing as npt

from mismatch_probe.records.sequences import FloatArray, IntArray, LoggedResponse


def split_by_mask(
    *,
    where: str,
    token_ids: IntArray,
    own: npt.NDArray[np.bool_],
    sampled: npt.NDArray[np.bool_],
    log_mu: FloatArray | None = None,
    log_pi: FloatArray | None = None,
    log_ref: FloatArray | None = None,
    entropy_nats: FloatArray | None = None,
    step: int | None = None,
    weight_version: str | None = None,
    temperature: float | None = None,
    group: str | None = None,
    num_padding: int = 0,
) -> LoggedResponse:
    """The response starts at the first token of its own; without any, all is prompt. Arrays [P + T] are cut there.

    own: the policy wrote the token. sampled: it did, and the token counts.
    """
    start = int(own.argmax()) if own.any() else own.size

    def cut(values: FloatArray | None) -> FloatArray | None:
        return None if values is None else values[start:]

    return LoggedResponse(
        where=where,
        prompt_token_ids=token_ids[:start],
        token_ids=token_ids[start:],
        sampled=sampled[start:],
        log_mu=cut(log_mu),
        log_pi=cut(log_pi),
        log_ref=cut(log_ref),
        entropy_nats=cut(entropy_nats),
        step=step,
        weight_version=weight_version,
        temperature=temperature,
        group=group,
        num_padding=num_padding,
    )
