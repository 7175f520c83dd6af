"""slime: a function for `--rollout-data-postprocess-path`, called on every rank before it trains on a rollout.

    --rollout-data-postprocess-path mismatch_probe.adapters.slime.guard_rollout

Guards see both sides' log-probs of the whole rollout. To skip is to mask every token out of the loss, so the gradient
is 0; Adam's momentum still moves the weights a little. To stop is to raise `TrainingStopped`, on every rank. The file
that `MISMATCH_PROBE_GUARDS` names replaces the default guards. Read in slime 624b824a.
"""

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from mismatch_probe.arrays import as_numbers, flat_values
from mismatch_probe.errors import TrainingStopped, UsageError
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.rewards import RewardTotals
from mismatch_probe.guards.sums import Sums
from mismatch_probe.stats.sequences import Mask

CAN: Final = ("skip", "stop")
"""What this adapter carries out."""

GUARDS_FILE: Final = "MISMATCH_PROBE_GUARDS"

logger = logging.getLogger(__name__)


def guard_rollout(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Decide on a rollout: the same on every rank, since each adds up what all have measured.

    Raises:
        TrainingStopped: a guard ended the run; the message is its diagnosis.
    """
    rewards = _rewards(args, rollout_data)
    own = _sums_of_rollout(rollout_data, rewards if is_first() else RewardTotals())
    decision = guards().observe(Sums.of_arrays(of_ranks(own.to_array())), step=rollout_id + 1)
    if decision.events and is_first():
        logger.warning("%s", decision)
    if decision.stop:
        raise TrainingStopped(str(decision.diagnosis))
    if decision.skip:
        rollout_data["loss_masks"] = [torch.zeros_like(mask) for mask in rollout_data["loss_masks"]]


@cache
def guards() -> Guards:
    """The guards of this process, which remember the run. Every rank asks for them: all exchange whether they could
    read their file, so that no rank waits for another.

    Raises:
        UsageError: the file of one of the ranks cannot be used.
    """
    path = os.environ.get(GUARDS_FILE)
    guards, error = Guards.default(can=CAN), None
    try:
        guards = guards if path is None else Guards.from_file(path, can=CAN)
    except UsageError as own:
        error = own
    for failure in of_ranks(error):
        if failure is not None:
            raise failure
    return guards


def _sums_of_rollout(rollout_data: dict[str, Any], rewards: RewardTotals) -> Sums:
    """Sums of the responses that this rank counts: the last pipeline stage holds the log-probs, and of the ranks that
    share responses the first one counts them. The rewards are those of all ranks.
    """
    log_pi, log_mu = (_of_all_ranks(rollout_data, name) for name in ("log_probs", "rollout_log_probs"))
    if not _counts() or not rollout_data["loss_masks"]:
        return Sums(rewards=rewards)
    masks, cut_flags = rows_of(rollout_data["loss_masks"]), rollout_data.get("truncated")
    return Batch(log_pi, log_mu, masks, rewards=rewards, truncated=cut_flags).measure()


def _of_all_ranks(rollout_data: dict[str, Any], name: str) -> list[Any] | None:
    """A column whose responses may be spread over the ranks of context parallelism; None where it is not recorded."""
    values = rollout_data.get(name)
    if not values:
        return None
    if dist.is_initialized() and _parallel().get_context_parallel_world_size() > 1:
        from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

        lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
        values = [all_gather_with_cp(row, *of_row) for row, of_row in zip(values, lengths, strict=True)]
    return rows_of(values)


def rows_of(values: Sequence[torch.Tensor]) -> list[Any]:
    return [row.detach().cpu().double().numpy() for row in values]


def _rewards(args: Any, rollout_data: dict[str, Any]) -> RewardTotals:
    """Of the whole rollout, which every rank holds, prompt after prompt; which responses were cut is gathered."""
    columns = of_ranks((rollout_data.get("partition"), rollout_data.get("truncated")))
    rewards = rollout_data.get("raw_reward")
    if rewards is None:
        return RewardTotals()
    numbers = as_numbers(flat_values(rewards, "raw_reward"))
    has_all_samples = len(numbers) % args.n_samples_per_prompt == 0
    prompts = np.arange(len(numbers)) // args.n_samples_per_prompt if has_all_samples else None
    return RewardTotals.of(numbers, prompts, _is_cut(columns, len(numbers)))


def _is_cut(columns: Sequence[tuple[Sequence[int] | None, Sequence[int] | None]], num_responses: int) -> Mask | None:
    """Which responses of the whole rollout were cut; None where a rank does not know of one of them.

    columns: of each rank, the places of its responses in the rollout, and whether each was cut.
    """
    is_cut = np.full(num_responses, -1)
    for places, cut_flags in columns:
        if cut_flags is not None:
            is_cut[range(num_responses) if places is None else list(places)] = cut_flags
    return None if (is_cut < 0).any() else is_cut == 1


def _parallel() -> Any:
    from megatron.core import mpu

    return mpu


def _counts() -> bool:
    if not dist.is_initialized():
        return True
    mpu = _parallel()
    holds_log_probs = mpu.is_pipeline_last_stage() and mpu.get_context_parallel_rank() == 0
    return bool(holds_log_probs) and is_first_of_tensor_parallel()


def is_first_of_tensor_parallel() -> bool:
    """Of the ranks that compute the same tokens together."""
    return not dist.is_initialized() or bool(_parallel().get_tensor_model_parallel_rank() == 0)


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def of_ranks(own: Any) -> list[Any]:
    if not dist.is_initialized():
        return [own]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    return rows
