"""The tables of what was named and who was accused, put where the report has its marks."""

from pathlib import Path
from typing import Any

from benchmarks.planted_logs.judging import binomial

Row = dict[str, Any]
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
LEVELS = ("weak", "usual", "strong")
ITEMS = {
    1: "turns", 2: "heads and masks", 3: "places", 4: "a side's own noise", 5: "replayed choices", 6: "metrics alone",
    7: "servers without log-probs", 8: "weights within a response",
}  # fmt: skip


def share(named: int, planted: int) -> str:
    low, high = binomial(named, planted)
    return f"{named} of {planted} [{low:.0%}, {high:.0%}]"


def is_right(row: Row) -> bool:
    return bool(row["cause"]) and row["place"] is not False and row["side"] is not False


def of_level(rows: list[Row], level: str) -> list[Row]:
    return [row for row in rows if row["key"][2] == level]


def tables(rows: list[Row]) -> str:
    faults = [row for row in rows if row["key"][2] != "clean"]
    sound = of_level(rows, "clean")
    lines = ["| item | weak | usual | strong |", "|---|---|---|---|"]
    for item, words in [*ITEMS.items(), (0, "**all**")]:
        mine = [row for row in faults if item in (0, row["key"][0])]
        cells = [
            share(sum(map(is_right, level)), len(level)) if (level := of_level(mine, name)) else "" for name in LEVELS
        ]
        lines.append(f"| {item or ''} {words} | {' | '.join(cells)} |")
    lines += ["", "| item | fault | weak | usual | strong |", "|---|---|---|---|---|"]
    for item, name in dict.fromkeys(
        (row["key"][0], row["key"][1]) for row in sorted(faults, key=lambda row: row["key"][0])
    ):
        mine = [row for row in faults if row["key"][:2] == [item, name]]
        cells = [
            f"{sum(bool(row['cause']) for row in level)} / {sum(map(is_right, level))} of {len(level)}"
            for level in (of_level(mine, strength) for strength in LEVELS)
        ]
        lines.append(f"| {item} | {name} | {' | '.join(cells)} |")
    lines += ["", "| sound logs | accused |", "|---|---|"]
    for name in dict.fromkeys(row["key"][1] for row in sound):
        mine = [row for row in sound if row["key"][1] == name]
        lines.append(f"| {name} | {sum(not row['cause'] for row in mine)} of {len(mine)} |")
    accused = sum(not row["cause"] for row in sound)
    lines.append(f"| **all** | {share(accused, len(sound))} |")
    return "\n".join(lines)


def publish(rows: list[Row], path: Path) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Faults planted in logs\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{tables(rows)}\n{END}{rest.split(END)[1]}", encoding="utf-8")
