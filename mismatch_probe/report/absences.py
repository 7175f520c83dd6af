"""What could not be had of which pairs, and why: said once, in words."""

from collections.abc import Mapping, Sequence
from typing import Final

from mismatch_probe.notation import ABSENT, Written
from mismatch_probe.report.view import Cell, Note

_WORDS: Final = {
    "budget_tokens": "a fitted length budget",
    "budget_closed_form": "the closed form of the length budget",
    "drift_per_1000": "the drift of S",
    "error_correlation": "the correlation of the two errors",
    "rms_error_mu": "the engine's error",
    "rms_error_pi": "the training path's error",
    "share_pi": "the training path's share of the error",
    "spread_coefficient": "the spread",
    "spread_exponent": "its exponent",
}


def absences(of_pairs: Sequence[tuple[str, Mapping[str, str]]]) -> Note | None:
    """`of_pairs`: the label of each pair, and the reason by the name of what is absent; None where nothing is."""
    named: dict[tuple[str, str], list[str]] = {}
    for label, reasons in of_pairs:
        for reason in dict.fromkeys(reasons.values()):
            names = [_WORDS.get(name, name.replace("_", " ")) for name, why in reasons.items() if why == reason]
            named.setdefault((", ".join(names), reason), []).append(label)
    items = [f"{', '.join(labels)}: {names}, since {reason}" for (names, reason), labels in named.items()]
    return Note("What could not be had:", items) if items else None


def with_values(rows: Sequence[list[Cell]]) -> list[list[Cell]]:
    """The rows of a table, behind their names, that hold a value; why others hold none is said under it."""
    return [row for row in rows if any(cell != ABSENT and cell != Written(ABSENT) for cell in row[1:])]
