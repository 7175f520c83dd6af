"""Zeros that a log has for what was not recorded, told by the other side of a pair, whoever computed that one."""

from collections.abc import Collection, Mapping

import numpy as np

from mismatch_probe.stats.sequences import Mask, Reals, rows_of
from mismatch_probe.stats.zeros import zeros_for_missing


def without_zeros_for_missing(
    logprobs: Mapping[str, list[Reals]], judged: Collection[str]
) -> tuple[dict[str, list[Reals]], int]:
    """The log-probs of each row, by their role in a pair (`mu`, `pi`, `ref`), with NaN for such zeros of the roles to
    be judged; and how many tokens have one. A row whose roles are not of one length stays as it is.
    """
    of_rows = zip(*logprobs.values(), strict=True)
    rows = [row for row, sides in enumerate(of_rows) if sides[0].size and len({side.size for side in sides}) == 1]
    cleaned = {role: list(values) for role, values in logprobs.items()}
    if not rows:
        return cleaned, 0
    offsets = np.cumsum([0, *(logprobs["mu"][row].size for row in rows)])
    with_one: Mask = np.zeros(offsets[-1], dtype=np.bool_)
    for role in (role for role in judged if role in logprobs):
        values, others = (
            np.concatenate([logprobs[name][row] for row in rows]) for name in (role, "pi" if role == "mu" else "mu")
        )
        absent = zeros_for_missing(values, others, offsets)
        with_one |= absent
        if absent.any():
            parts = rows_of(np.where(absent, np.nan, values), offsets)
            for row, part in zip(rows, parts, strict=True):
                cleaned[role][row] = part
    return cleaned, int(with_one.sum())
