"""What trainers call the metrics of the mismatch. `metric_names.toml` is data: which trainer calls which of our metrics
what, and where in its code that is computed.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

OWN_NAMES: Final = "mismatch-probe"
"""The trainer of the table whose names this tool gives."""


@dataclass(frozen=True)
class MetricName:
    """What a trainer calls a metric: `metric` is one of ours or a quantity of the table, `source` where it is made."""

    name: str
    trainer: str
    metric: str
    source: str
    note: str = ""


@cache
def _names_table() -> dict[str, Any]:
    return tomllib.loads(files("mismatch_probe.logs").joinpath("metric_names.toml").read_text(encoding="utf-8"))


@cache
def metric_names() -> dict[str, MetricName]:
    """Every name that is known, in the order of the table."""
    names = {}
    for trainer in _names_table()["trainer"]:
        for name, entry in trainer["metrics"].items():
            source = f"{trainer['commit']}, {entry['in']}"
            names[name] = MetricName(name, trainer["name"], entry["is"], source, entry.get("note", ""))
    return names


@cache
def first_step_names() -> dict[str, tuple[str, ...]]:
    """Of each quantity whose first step must not depend on the parallel layout: the names that trainers give it."""
    names_with_trainer = metric_names().values()
    names_of: dict[str, list[str]] = _names_table()["first_step"]
    return {quantity: tuple(names) for quantity, names in names_of.items()} | {
        quantity: tuple(name.name for name in names_with_trainer if name.metric == quantity)
        for quantity in ("entropy", "kl_k3")
    }


def loop_names() -> dict[str, str]:
    """What trainers call numbers of the training loop, and the metric of ours that guards read."""
    names: dict[str, str] = _names_table()["loop"]
    return names


def quantity_words() -> dict[str, str]:
    """What trainers log that is no metric of ours, in words."""
    words: dict[str, str] = _names_table()["quantities"]
    return words


@cache
def console_words() -> dict[str, str]:
    """The words before a number on a console line, and the name that it has elsewhere."""
    return {
        entry["on_console"]: name
        for trainer in _names_table()["trainer"]
        for name, entry in trainer["metrics"].items()
        if "on_console" in entry
    }
