"""A row of bad input, and what the rows stand on: checkpoints and run directories, made once and only read."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mismatch_probe.config.model import EvaluationSettings
from mismatch_probe.errors import ExitCode
from mismatch_probe.gate.reading import NoiseFloor, write_floor
from mismatch_probe.records.answers import Evaluation, EvaluationDirectory
from mismatch_probe.records.findings import Findings
from tests.gate.cli import GATE, GOOD
from tests.report.documents import headroom, localization
from tests.report.training.training_runs import TrainingSample, firing, training_run
from tests.simulated_run import Simulation, simulated_run
from tests.tiny_models import make_checkpoint

Content = str | bytes
Change = Callable[[Path], object]

BROKEN: Final = ExitCode.ENVIRONMENT


@dataclass(frozen=True)
class Bad:
    """A command that is met with `words` and `code`.

    In the command stand places of `Grounds`, `{out}` for a folder that is not there yet, `{file}` for a file of this
    suffix and content, and `{changed}` for a copy of the place `of` after `change`.
    """

    command: str
    words: str
    code: ExitCode = ExitCode.USAGE
    file: tuple[str, Content] | None = None
    of: str = ""
    change: Change | None = None
    name: str = ""

    def __str__(self) -> str:
        content = "" if self.file is None else repr(self.file[1])[:60]
        return " ".join([self.command, self.name, content])[:140].encode("ascii", "backslashreplace").decode()


class Grounds:
    """Places by name."""

    def __init__(self, folder: Path) -> None:
        self.places = {"missing": folder / "missing", "folder": folder, "tiny": make_checkpoint(folder / "tiny")}
        run = simulated_run(folder / "run", Simulation(num_prompts=8, mean_length=12), with_summary=True)
        self.places["run"] = run.path
        evaluation = EvaluationDirectory(shutil.copytree(run.path, folder / "evaluation"))
        evaluation.write_evaluation(_evaluation())
        self.places["evaluation"] = evaluation.path
        sample = TrainingSample(steps=4, firings=(firing(3, ["warn"]),))
        self.places["training"] = training_run(folder / "training", sample).path
        self.places["sanity"] = Path(shutil.copytree(self.places["training"], folder / "sanity"))
        edited("manifest.json", lambda manifest: manifest["content_keys"].update(sanity="0"))(self.places["sanity"])
        for name, document in (("headroom", headroom()), ("localize", localization())):
            (folder / name).mkdir()
            Findings(folder / name).write(document)
            self.places[name] = folder / name
        self.places["floor"] = folder / "floor.json"
        write_floor(self.places["floor"], NoiseFloor(model_fingerprint="a", runs=[], num_sequences=1, entries=[]))
        self.places["gate"] = folder / "gate.toml"
        self.places["gate"].write_text(GATE + GOOD)
        for suffix in ("toml", "yaml", "jsonl", "parquet"):
            os.mkfifo(folder / f"pipe.{suffix}")
            (folder / f"folder.{suffix}").mkdir()

    def words(self, bad: Bad, folder: Path) -> list[str]:
        """The command's words; what the row adds is put into `folder`."""
        places = {**self.places, "out": folder / "out"}
        if bad.file is not None:
            suffix, content = bad.file
            places["file"] = folder / f"file{suffix}"
            places["file"].write_bytes(content.encode() if isinstance(content, str) else content)
        if bad.change is not None:
            places["changed"] = Path(shutil.copytree(self.places[bad.of], folder / "changed"))
            bad.change(places["changed"])
        return [word.format(**places) for word in bad.command.split(" ")]


def _evaluation() -> Evaluation:
    return Evaluation(
        tool_version="0", model="simulated", model_fingerprint="a", task="sums", settings=EvaluationSettings()
    )


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Change a JSON document of the folder in place."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def written(name: str, content: Content) -> Change:
    """Put a file in the folder, in place of what is there."""

    def put(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return put


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def as_folder(name: str) -> Change:
    """A folder in place of a file."""

    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return replace


def as_pipe(name: str) -> Change:
    """A pipe in place of a file: whoever opens it to read waits for ever."""

    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return replace


def cut(name: str) -> Change:
    """A file without its end."""

    def shorten(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-30])

    return shorten
