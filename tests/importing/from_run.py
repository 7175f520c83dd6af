"""The records of a comparison as the lines of a plain log."""

from typing import Any

import pyarrow.compute as pc

from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import in_order, read_table


def log_of_run(run: RunDirectory, dtype: str) -> list[dict[str, Any]]:
    """Each response that the engine's side sampled, with both sides' log-probs."""
    rollouts = read_table(run.rollouts_path)
    rollouts = rollouts.filter(pc.equal(rollouts["sampler"], f"infer-{dtype}"))
    ids = rollouts["id"].to_pylist()
    mu, pi = (in_order(read_table(run.leg_path(leg)), ids) for leg in (f"infer-{dtype}-decode", f"train-{dtype}"))
    columns = (rollouts["prompt_token_ids"], rollouts["token_ids"], mu["logprobs"], pi["logprobs"])
    names = ("prompt_token_ids", "token_ids", "logprobs", "train_logprobs")
    return [dict(zip(names, row, strict=True)) for row in zip(*(column.to_pylist() for column in columns), strict=True)]
