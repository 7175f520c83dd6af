"""miles: its correction function gathers what guards need, its post-process function decides on the next rollout.

    --use-tis --custom-tis-function-path mismatch_probe.adapters.miles.truncate
    --rollout-data-postprocess-path mismatch_probe.adapters.miles.decide

miles hands log-probs to the correction function alone, a micro-batch at a time, while it trains. So guards decide on a
rollout when the next one comes: what they skip is that next one, and a fault has moved the weights once by then.
`truncate` corrects as miles' own does (token-level, within `--tis-clip-low` and `--tis-clip`). Read in miles 31f1ca961.
"""

import logging
from typing import Any, Final

import torch

from mismatch_probe.adapters.slime import guards, is_first, is_first_of_tensor_parallel, of_ranks, rows_of
from mismatch_probe.errors import TrainingStopped
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.sums import Sums

logger = logging.getLogger(__name__)


class _Rollout:
    """What this rank has seen of the rollout it trains on."""

    sums: Sums = Sums()
    withheld: bool = False
    """Whether guards asked to skip it."""


_ROLLOUT: Final = _Rollout()


def decide(args: Any) -> None:
    """Before a rollout is trained on: what guards say of the one before, on every rank.

    Raises:
        TrainingStopped: a guard ended the run; the message is its diagnosis.
    """
    sums, _ROLLOUT.sums = Sums.of_arrays(of_ranks(_ROLLOUT.sums.to_array())), Sums()
    if not sums.responses:
        return
    decision = guards().observe(sums)
    _ROLLOUT.withheld = decision.skip
    if decision.events and is_first():
        logger.warning("%s", decision)
    if decision.stop:
        raise TrainingStopped(str(decision.diagnosis))


def truncate(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, masks and metrics of a micro-batch, as miles asks for them.

    Under context parallelism this rank's tokens of a response count as a response of their own.
    """
    log_pi, log_mu = (torch.cat(values) for values in (train_log_probs, rollout_log_probs))
    is_whole = all(mask.numel() == row.numel() for mask, row in zip(loss_masks, train_log_probs, strict=True))
    masks = rows_of(loss_masks) if is_whole else None
    if is_first_of_tensor_parallel():
        _ROLLOUT.sums += Batch(rows_of(train_log_probs), rows_of(rollout_log_probs), masks).measure()
    ratio = torch.exp(log_pi - log_mu)
    weights = ratio.clamp(min=args.tis_clip_low, max=args.tis_clip)
    metrics = {"tis": ratio.detach(), "tis_clipfrac": (weights != ratio).float(), "tis_abs": (ratio - 1).abs().detach()}
    if _ROLLOUT.withheld:
        return pg_loss * 0, [torch.zeros_like(mask) for mask in loss_masks], metrics
    return pg_loss * weights, loss_masks, metrics
