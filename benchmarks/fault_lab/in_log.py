"""Faults of the log: recorded legs, edited as a broken join, a lossy transport or a second tokenisation would."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import leg_columns
from mismatch_probe.records.tables import read_table, write_table

Rows = list[dict[str, Any]]
Edit = Callable[[Rows], None]


def token_columns(row: dict[str, Any]) -> list[str]:
    """The columns of a leg with a value for each token, of those that the row has."""
    names = ["logprobs", *(name for name, column in leg_columns().items() if column.per_token)]
    return [name for name in names if row[name] is not None]


def edit_leg(run: RunDirectory, name: str, edit: Edit) -> None:
    """Change the rows of a leg in place."""
    legs = Legs(run, run.read_manifest().run_key)
    table = legs.read(name)
    rows: Rows = table.to_pylist()
    edit(rows)
    legs.write(name, pa.Table.from_pylist(rows, schema=table.schema))
    run.summary_path.unlink(missing_ok=True)


def relabel_engine(run: RunDirectory, dtype_asked: Dtype, really: Dtype) -> None:
    """The responses and legs of the engine in `really` pass for those of the engine in `asked`."""
    old, new = f"infer-{really}", f"infer-{dtype_asked}"

    def renamed(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"id": row["id"].replace(f"@{old}", f"@{new}")}

    table = read_table(run.rollouts_path)
    rows = [renamed(row) | {"sampler": new} if row["sampler"] == old else row for row in table.to_pylist()
            if row["sampler"] != new]  # fmt: skip
    write_table(run.rollouts_path, pa.Table.from_pylist(rows, schema=table.schema))
    legs = Legs(run, run.read_manifest().run_key)
    for part in ("decode", "prefill"):
        leg = legs.read(f"{old}-{part}")
        moved = [renamed(row) for row in leg.to_pylist()]
        legs.write(f"{new}-{part}", pa.Table.from_pylist(moved, schema=leg.schema))


def shifted(by: int) -> Edit:
    """Every log-prob moved `by` tokens along its response; what falls out comes back at the other end."""

    def edit(rows: Rows) -> None:
        for row in rows:
            for column in token_columns(row):
                row[column] = np.roll(np.asarray(row[column]), by).tolist()

    return edit


def exchanged(share: float, *, with_ids: bool) -> Edit:
    """A share of the rows in a circle of others' scores; `with_ids` the record says whose they are.

    Scores are cut or repeated to the length of their new row, as a join by position would.
    """

    def edit(rows: Rows) -> None:
        generator = np.random.default_rng(0)
        chosen = generator.permutation(len(rows))[: max(2, round(share * len(rows)))]
        donors = [dict(rows[index]) for index in np.roll(chosen, 1)]
        for index, donor in zip(chosen, donors, strict=True):
            row = rows[index]
            length = len(row["logprobs"])
            for column in token_columns(row):
                row[column] = donor[column] if with_ids else np.resize(np.asarray(donor[column]), length).tolist()
            if with_ids:
                row["ids_key"] = donor["ids_key"]

    return edit


def tokenised_again(share: float) -> Edit:
    """A share of the rows with one token merged away: other ids, another length."""

    def edit(rows: Rows) -> None:
        generator = np.random.default_rng(0)
        for index in generator.permutation(len(rows))[: max(1, round(share * len(rows)))]:
            row = rows[index]
            row["ids_key"] = int(generator.integers(2**63))
            for column in token_columns(row):
                row[column] = row[column][:-1]

    return edit


def spoiled(value: float, count: int) -> Edit:
    """`count` log-probs replaced by `value`, one a row."""

    def edit(rows: Rows) -> None:
        for row in rows[:count]:
            row["logprobs"][0] = value

    return edit
