"""What a folder holds. Every command that takes one asks here."""

from enum import Enum
from pathlib import Path
from typing import Final

from mismatch_probe.errors import BrokenRecord, RunDirectoryError, UsageError
from mismatch_probe.inert import command_line
from mismatch_probe.reading import Unreadable, as_object, is_folder, is_there, read_json
from mismatch_probe.records.atomic import require_regular_files

MANIFEST: Final = "manifest.json"
EVALUATION: Final = "evaluation.json"
HEADROOM_FILE: Final = "headroom.json"
LOCALIZATIONS: Final = "localize-*-*.json"
EXPLANATIONS: Final = "explain*.json"
CURVES_FILE: Final = "curves.json"
ABLATION_FILE: Final = "ablation.json"


class RunKind(Enum):
    """How a sentence names it, and what takes it."""

    COMPARISON = "a comparison", "`compare --resume` continues it"
    IMPORTED = "an imported log", "`report` shows it, `score` and `explain` compute on its token ids"
    EVALUATION = "an evaluation", "`evaluate --resume` continues it"
    TRAINING = "a training run", "`report` shows it, `train --resume` continues it"
    SANITY = "a sanity test", "`report` shows it, `sanity --resume` continues it"
    ABLATION = "an ablation", "`report` shows it, `ablate --resume` continues it"
    HEADROOM = "what headroom found", "`report` shows it"
    LOCALIZATION = "what localize found", "`report` shows it"
    CURVES = "a reading of metrics alone", "`report` shows it"

    def __init__(self, noun: str, takers: str) -> None:
        self.noun = noun
        self.takers = takers


COMPARISONS: Final = (RunKind.COMPARISON, RunKind.EVALUATION, RunKind.IMPORTED)
"""An evaluation is a comparison and what its responses earned; of an imported log, both sides were logged."""
TRAININGS: Final = (RunKind.TRAINING, RunKind.SANITY)
FINDINGS: Final = (RunKind.HEADROOM, RunKind.LOCALIZATION)


def kind_of(folder: Path) -> RunKind | None:
    """What the folder holds; None where it is not there, or holds nothing of this tool.

    Raises:
        BrokenRecord: it holds a manifest that cannot be read, or what is neither a folder nor a regular file.
    """
    path = folder / MANIFEST
    try:
        if is_there(path):
            require_regular_files(folder)
        manifest = as_object(read_json(path))
    except FileNotFoundError:
        if is_there(folder / HEADROOM_FILE):
            return RunKind.HEADROOM
        if is_there(folder / CURVES_FILE):
            return RunKind.CURVES
        return RunKind.LOCALIZATION if is_folder(folder) and any(folder.glob(LOCALIZATIONS)) else None
    except Unreadable as error:
        raise BrokenRecord(f"{path} cannot be read ({error}); give another run, or make it again") from error
    keys = manifest.get("content_keys")
    if "training_version" in manifest:
        return RunKind.SANITY if isinstance(keys, dict) and "sanity" in keys else RunKind.TRAINING
    if "grid_version" in manifest:
        return RunKind.ABLATION
    if manifest.get("log") is not None:
        return RunKind.IMPORTED
    if "manifest_version" in manifest:
        return RunKind.EVALUATION if is_there(folder / EVALUATION) else RunKind.COMPARISON
    raise BrokenRecord(f"{path} cannot be read (it has no version); give another run, or make it again")


def require_kind(folder: Path, *kinds: RunKind) -> None:
    """
    Raises:
        RunDirectoryError: the folder holds something else, or nothing.
        BrokenRecord: it holds a manifest that cannot be read.
    """
    kind = kind_of(folder)
    if kind in kinds:
        return
    if kind is not None:
        raise RunDirectoryError(
            f"{folder} holds {kind.noun} ({kind.takers}), and {kinds[0].noun} is wanted here; give another folder"
        )
    if is_there(folder) and not is_folder(folder):
        raise RunDirectoryError(f"{folder} is a file, not a run directory; give the folder that --out named")
    why = f"{folder / MANIFEST} does not exist" if is_there(folder) else f"{folder} does not exist"
    raise RunDirectoryError(f"{why}: it is not a run directory; give the folder that --out named")


def to_resume(folder: Path | None, *kinds: RunKind) -> Path:
    """The folder whose run goes on.

    Raises:
        UsageError: none is named.
        RunDirectoryError: it holds no run, or one of another kind.
        BrokenRecord: its manifest cannot be read.
    """
    if folder is None:
        raise UsageError("--resume needs --out: the run directory to continue")
    if kind_of(folder) is None:
        raise RunDirectoryError(
            f"{folder} holds no run that --resume could continue: leave --resume out to start one there, or fix --out"
        )
    require_kind(folder, *kinds)
    return folder


_DEEPEST: Final = 3
"""`RUN/parts/STAGE/FILE`"""


def go_on(path: Path) -> str:
    """What is to be typed to continue the comparison that `path`, its directory or a file in it, belongs to."""
    candidates = (path, *list(path.parents)[:_DEEPEST])
    run = next((folder for folder in candidates if is_there(folder / MANIFEST)), None)
    if run is None:
        return "make the run again"
    return f"continue the run with `{command_line('compare', '--resume', '--out', run)}`"
