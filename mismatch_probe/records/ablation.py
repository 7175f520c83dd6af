"""The files of an ablation: its manifest, and one record of what came of every cell and every variant."""

from pathlib import Path
from typing import Any, Final, Literal

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.digests import read_manifest, write_manifest
from mismatch_probe.records.files import ABLATION_FILE, RunKind, require_kind
from mismatch_probe.records.log_readings import Entry
from mismatch_probe.records.manifest import read_document, write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Record
from mismatch_probe.records.training_run import GuardFirings, TrainingDirectory

CellState = Literal["pending", "unfinished", "finished", "stopped", "broken"]
"""`stopped` by a guard, which is a result; `broken` by what is none."""

COLLAPSED_BELOW: Final = 0.5
"""Of the best mean reward before: a run that ends below has collapsed."""
GROWN_ABOVE: Final = 3.0
"""Times the mean KL of the first steps: above it the mismatch has grown."""

FIRST_STEP_OF_GROWTH: Final = 4
"""Of a run: three steps are compared with the first three, so none before can show growth."""


class OverSeeds(Record):
    """A mean over the seeds of a variant, with Student's t interval."""

    value: float
    low: float | None
    """None with one seed."""
    high: float | None
    num_seeds: int


class CellResult(Record):
    """What came of one cell, from its own files. `last` and `first` are means over `window` steps."""

    name: str
    variant: str
    axes: dict[str, str]
    seed: int
    state: CellState
    reason: str | None
    """Why it is stopped or broken."""
    steps: int = 0
    steps_asked: int
    window: int = 0
    seconds: float | None = None
    """Of the process that ran it, its start and its end with it; None where a resume ran a part of it."""
    reward_first: float | None = None
    reward_last: float | None = None
    reward_best: float | None = None
    reward_best_step: int | None = None
    reward_pi_last: float | None = None
    """The reward under pi."""
    accuracy_last: float | None = None
    """The share of responses that earn 1 or more, as mu samples them."""
    accuracy_pi_last: float | None = None
    reward_gap: float | None = None
    """Deployment gap: reward under mu less that under pi, over the last steps."""
    accuracy_gap: float | None = None
    kl_first: float | None = None
    """KL (k3), nats a token."""
    kl_last: float | None = None
    kl_all: float | None = None
    """Over all steps."""
    prob_diff_lowest: float | None = None
    """Of pi - mu, at any token of the run."""
    prob_diff_lowest_step: int | None = None
    prob_diff_highest: float | None = None
    prob_diff_highest_step: int | None = None
    pass_step: int | None = None
    """Where accuracy first was above 95 %: of a sanity test over all its problems, else the mean of `window` steps."""
    collapse_step: int | None = None
    """Of a run that ends below half of its best: the first step at which the mean reward of three steps was so low."""
    growth_step: int | None = None
    """The first step whose median KL over three steps is above three times that of the first ones."""
    lead_steps: int | None = None
    """Steps from the growth of the mismatch to the collapse; negative where it came after."""
    skipped_updates: int = 0
    step_seconds: float | None = None
    """Median over the steps, as are the rates."""
    score_seconds: float | None = None
    """Of these, in the forward pass that corrections need."""
    learn_seconds: float | None = None
    """Of these, in the forward and backward passes of all updates."""
    score_over_learn: float | None = None
    """The time of that pass over that of learning: a third where a backward pass takes twice a forward one; with one
    update a step, where learning is the backward pass alone, a half.
    """
    sampled_tokens_per_second: float | None = None
    scored_tokens_per_second: float | None = None
    learned_tokens_per_second: float | None = None
    clipped_share: float | None = None
    """Of tokens, by the correction; mean over all steps, as the next two."""
    rejected_share: float | None = None
    effective_share: float | None = None
    """Effective sample size of the correction's weights."""
    guards: list[GuardFirings] = []


class VariantResult(Record):
    """Cells that differ in nothing but their seed; each number is over those that have it."""

    label: str
    axes: dict[str, str]
    """Without the seed."""
    num_cells: int
    num_done: int
    """Finished, or stopped by a guard."""
    num_broken: int
    num_stopped: int
    num_passed: int
    num_collapsed: int
    num_grown_first: int
    """Of those that collapsed: whose mismatch grew before."""
    means: dict[str, OverSeeds]
    """By the name of the number in `CellResult`."""


class VariantRatio(Record):
    """How many times the KL of one variant is another's: geometric mean over the seeds that both have."""

    of: str
    over: str
    first: OverSeeds | None
    """Over the first steps, when both have learnt next to nothing."""
    last: OverSeeds | None
    differs_in: list[str]
    """Settings but the dtypes: where there are any, the later ratio also compares what each has learnt."""


class AblationResult(Record):
    """What came of an ablation; `ablate --json` prints it."""

    ablation_version: int = 1
    tool_version: str
    models: list[str]
    task: str
    """Where cells differ in it, all of them with commas."""
    command: list[str]
    is_sanity: bool
    """Whether each cell is a sanity test."""
    level: float
    """Of every interval."""
    most_at_once: int = 1
    """Cells that ran at a time, at the most: above 1 they took time from each other."""
    cells: list[CellResult]
    variants: list[VariantResult]
    ratios: list[VariantRatio]

    @property
    def exit_code(self) -> ExitCode:
        """A cell that broke leaves the grid with a hole."""
        return ExitCode.ENVIRONMENT if any(cell.state == "broken" for cell in self.cells) else ExitCode.PASS


class AblationManifest(Entry):
    """What was asked for, and what became of cells that left no files of their own.

    run_key and digest: as a comparison's.
    """

    grid_version: int = 1
    tool_version: str
    created_at: str
    command: list[str]
    settings: dict[str, Any]
    """As a file would hold them: those of `train`, the grid, and the sanity test's."""
    cells: list[str]
    """Their names, in their order."""
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    """Why a cell broke, by its name."""
    most_at_once: int = 1
    """Cells that ran at a time, at the most: above 1 they took time from each other."""
    versions: dict[str, str]
    hardware: dict[str, Any]
    git: dict[str, Any] | None
    run_key: str = ""
    digest: str = ""


class AblationDirectory(RunDirectory):
    """Paths and documents of one ablation."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.result_path = path / ABLATION_FILE

    def cell(self, name: str) -> TrainingDirectory:
        """The training run of a cell."""
        return TrainingDirectory(self.path / "cells" / name)

    def discard_without_results(self) -> None:
        """Remove an ablation of which no cell was started."""
        if not (self.path / "cells").exists():
            self.remove()

    def write_ablation_manifest(self, manifest: AblationManifest) -> None:
        write_manifest(self.manifest_path, manifest, manifest.run_key)

    def read_ablation_manifest(self) -> AblationManifest:
        require_kind(self.path, RunKind.ABLATION)
        return read_manifest(self.manifest_path, AblationManifest, missing="it is no ablation", fix="run it again")

    def write_result(self, result: AblationResult) -> None:
        write_document(self.result_path, result)

    def read_result(self) -> AblationResult:
        return read_document(
            self.result_path, AblationResult, missing="no cell was run yet", fix="make it again with `report`"
        )
