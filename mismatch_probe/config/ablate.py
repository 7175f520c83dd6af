"""The grid of an ablation: which settings of `train` vary, and the cells that follow from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import PurePath
from typing import Annotated, Any, Final

from pydantic import Field, field_validator

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import Count, CountOrNone, ListAsTuple, SanitySettings, Seed, Settings
from mismatch_probe.config.train import LearningRate, TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.reading import merge_tables, nest_names

_SEED: Final = "seed"
_BETWEEN: Final = "/"
_OF_ALL_CELLS: Final = ("model.", "task.reward", "engine", "infer")
"""Beginnings of settings that no grid varies."""

OneOf = Annotated[tuple[Any, ...], ListAsTuple]


class GridSettings(Settings):
    """The values of each axis; every combination of them is a variant, and each variant is run with every seed."""

    model: Annotated[tuple[str, ...], ListAsTuple] = ()
    """Checkpoints."""
    precision: Annotated[tuple[str, ...], ListAsTuple] = ()
    """`bf16/fp16`: the training path in BF16, the engine in FP16; `bf16` alone is both."""
    objective: Annotated[tuple[str, ...], ListAsTuple] = ()
    learning_rate: Annotated[tuple[LearningRate, ...], ListAsTuple] = ()
    updates: Annotated[tuple[Count, ...], ListAsTuple] = ()
    """Updates on the responses of one step."""
    lora_rank: Annotated[tuple[CountOrNone, ...], ListAsTuple] = ()
    """0 trains all weights."""
    max_new_tokens: Annotated[tuple[Count, ...], ListAsTuple] = ()
    further: Annotated[dict[str, OneOf], Field(default_factory=dict)]
    """Other settings of `train` by their dotted names, each with its values."""
    seed: Annotated[tuple[Seed, ...], ListAsTuple] = ()

    @field_validator("precision")
    @classmethod
    def _with_both_dtypes(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_BETWEEN.join(_both_dtypes(value)) for value in values)

    @field_validator("further")
    @classmethod
    def _runs_no_code(cls, axes: dict[str, OneOf]) -> dict[str, OneOf]:
        for name in axes:
            if name.startswith(_OF_ALL_CELLS):
                raise ValueError(
                    f"{name} can run code or name a server, which a run directory may not give back; set it for all "
                    "cells, outside of the grid"
                )
        return axes

    def axes(self) -> dict[str, Sequence[Any]]:
        """The values of each axis that has any, but the seeds."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name not in ("further", _SEED)}
        return {name: values for name, values in {**own, **self.further}.items() if values}


def _both_dtypes(text: str) -> tuple[str, str]:
    """The dtypes of the training path and of the engine.

    Raises:
        ValueError: it is not written as one dtype or as two.
    """
    train, slash, infer = text.partition(_BETWEEN)
    return Dtype.parse(train), Dtype.parse(infer if slash else train)


_SETTINGS: Final = {
    "model": "model.path",
    "objective": "objective.name",
    "learning_rate": "optimizer.learning_rate",
    "updates": "rollout.updates",
    "max_new_tokens": "rollout.max_new_tokens",
}
"""The setting of each axis that is one setting under another name."""


@dataclass(frozen=True)
class GridCell:
    """A training run of the grid: its folder's name, the values of the grid's axes in words, and its settings."""

    name: str
    axes: dict[str, str]
    settings: TrainSettings


@dataclass(frozen=True)
class Ablation:
    """What an ablation is to run; with `sanity` each cell is a sanity test."""

    cells: list[GridCell]
    """Every variant with the first seed, then every variant with the next: what is done early can be compared."""
    sanity: SanitySettings | None
    values: dict[str, Any]
    """The settings as a file would hold them, from which all this follows."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Ablation":
        """Of the settings of `train` with a table `grid`, or a list of such tables, and `sanity` where there is one.

        Raises:
            UsageError: a setting cannot be used, the grid is empty, or two cells would have one folder.
        """
        base = {name: value for name, value in values.items() if name not in ("grid", "sanity")}
        tables = values.get("grid", {})
        grids = [
            parse_settings(GridSettings, table if isinstance(table, Mapping) else {"grid": table}, "the grid")
            for table in (tables if isinstance(tables, list | tuple) else [tables])
        ]
        sanity = None if values.get("sanity") is None else parse_settings(SanitySettings, values["sanity"])
        varying = _varying_axes(grids)
        cells: dict[str, GridCell] = {}
        for cell in (cell for grid in grids for cell in _cells(base, grid, varying)):
            if cells.setdefault(cell.name, cell).settings != cell.settings:
                raise UsageError(
                    f"two cells of the grid are called {cell.name} and have other settings; give every grid of the "
                    "file the same axes"
                )
        if len(cells) < 2:
            raise UsageError(
                "nothing varies in the grid; give --precision, --objective, --seed or another of its flags more than "
                "once, or a table [grid] in --config, or run the one cell with `train`"
            )
        seeds = list(dict.fromkeys(cell.settings.seed for cell in cells.values()))
        in_order = sorted(cells.values(), key=lambda cell: seeds.index(cell.settings.seed))
        return cls(in_order, sanity, dict(values))

    def variants(self) -> dict[str, list[GridCell]]:
        """Cells that differ in nothing but their seed, under what tells them from the others."""
        varying = self.varying_axes()
        groups: dict[str, list[GridCell]] = {}
        for cell in self.cells:
            groups.setdefault(variant_label(cell.axes, varying), []).append(cell)
        return groups

    def varying_axes(self) -> list[str]:
        """The axes with more than one value, or the precision where there is none."""
        names = dict.fromkeys(name for cell in self.cells for name in cell.axes if name != _SEED)
        varying = [name for name in names if len({cell.axes.get(name) for cell in self.cells}) > 1]
        return varying or ["precision"]


def variant_label(axes: Mapping[str, str], varying: Sequence[str]) -> str:
    """`BF16/FP16, pg-seq-is`."""
    return ", ".join(axes[name] for name in varying if name in axes)


def _varying_axes(grids: Sequence[GridSettings]) -> list[str]:
    """The axes that do not have one and the same value in all cells."""
    columns = [grid.axes() for grid in grids]
    names = dict.fromkeys(name for axes in columns for name in axes)
    return [name for name in names if len({repr(value) for axes in columns for value in axes.get(name, (None,))}) > 1]


def _cells(base: Mapping[str, Any], grid: GridSettings, varying: Sequence[str]) -> Iterator[GridCell]:
    """An axis with one value is a setting of all cells, and in no name."""
    axes, seeds = grid.axes(), grid.seed or (base.get(_SEED, 0),)
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        for seed in seeds:
            table = merge_tables(base, _as_settings({**values, _SEED: seed}))
            if values.get("lora_rank") == 0:
                table["policy"] = {**table.get("policy", {}), "lora": None}
            if "model" not in table:
                raise UsageError("no model to train; give --model FOLDER, a hub id, or `--model demo`")
            words = {name: _axis_words(name, value) for name, value in values.items() if name in varying}
            name = ".".join([*map(_slug, words.values()), f"seed-{seed}"])
            settings = parse_settings(TrainSettings, table, f"cell {name}")
            precision = precision_words(settings.train_dtype, settings.infer_dtype)
            yield GridCell(name, {"precision": precision, **words, _SEED: str(seed)}, settings)


def _as_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if name == "precision":
            settings["train_dtype"], settings["infer_dtype"] = _both_dtypes(value)
        elif name == "lora_rank":
            settings["policy.lora.rank"] = value or None
        else:
            settings[_SETTINGS.get(name, name)] = value
    return nest_names(settings)


def precision_words(train: str, infer: str) -> str:
    """`BF16/FP16`: the training path's dtype, then the engine's."""
    return f"{train.upper()}{_BETWEEN}{infer.upper()}"


def _axis_words(name: str, value: Any) -> str:
    match name:
        case "precision":
            return precision_words(*_both_dtypes(value))
        case "model":
            return PurePath(value).name
        case "objective":
            return str(value)
        case "learning_rate":
            return f"rate {value:g}"
        case "updates":
            return f"{value} update{'' if value == 1 else 's'} a step"
        case "lora_rank":
            return f"LoRA of rank {value}" if value else "all weights"
        case "max_new_tokens":
            return f"{value} tokens"
    return f"{name.rpartition('.')[2].replace('_', ' ')} {value}"


def _slug(words: str) -> str:
    """As part of a folder's name."""
    return "".join(letter if letter.isalnum() or letter in "-+" else "-" for letter in words.lower())
