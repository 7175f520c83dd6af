"""The responses of one step of training: a checkpoint has the weights of one."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.errors import UsageError


def of_step(rollouts: pa.Table, run: Path, step: int | None) -> pa.Table:
    """The responses of a step, of the only one where none is named.

    Raises:
        UsageError: there are several and none is named, or none of that number.
    """
    steps = sorted(pc.unique(rollouts["step"]).drop_null().to_pylist())
    if step is None:
        if len(steps) > 1:
            raise UsageError(
                f"{run} has responses of {len(steps)} steps ({steps[0]} to {steps[-1]}), and one checkpoint has the "
                "weights of one: give --step"
            )
        return rollouts
    if step not in steps:
        there = f"{steps[0]} to {steps[-1]}" if steps else "not known"
        raise UsageError(f"{run} has no response of step {step}; its steps are {there}: mend --step")
    return rollouts.filter(pc.equal(rollouts["step"], step)).combine_chunks()
