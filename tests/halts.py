"""`python -m tests.halts POINT WORDS`: the program on those words, which halts at a point of its run.

The process that reaches the point, the command or a job that is forked from it, holds still until it is ended, so a
test that kills the command there is never too late; where the point ends with `:FILE` it goes on once that file exists.
`wait_until` is how a test waits for the point.
"""

import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, Protocol

from mismatch_probe.compare.plan import StageStarted
from mismatch_probe.compare.run import Recorder
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.run_directory import Parts, RunDirectory
from mismatch_probe.records.training_run import TrainingDirectory
from tests.processes import is_running

PATIENCE_SECONDS: Final = 300.0
"""Long, since it ends a test that fails: a machine of continuous integration can be several times slower."""
_POLL_SECONDS: Final = 0.01
_release: Path | None = None
"""The file at which what halts goes on."""


class _Process(Protocol):
    """What ends, as `WarmProcess` and `subprocess.Popen` show it."""

    def poll(self) -> int | None: ...


def wait_until(
    has_happened: Callable[[], object],
    event: str,
    process: _Process | int | None = None,
    seconds: float = PATIENCE_SECONDS,
) -> None:
    """An assertion fails where the process, or that of this id, ends before the event, or where it takes longer than
    `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not has_happened():
        assert not _has_ended(process), f"the process ended before {event}"
        assert time.monotonic() < deadline, f"{event} did not happen within {seconds:g} s"
        time.sleep(_POLL_SECONDS)


def _has_ended(process: _Process | int | None) -> bool:
    if isinstance(process, int):
        return not is_running(process)
    return process is not None and process.poll() is not None


def is_begun(run: Path, stage: str) -> bool:
    """Whether the manifest has the settings with which a stage began, and a part of it is there."""
    directory = RunDirectory(run)
    record = directory.read_manifest().stages.get(stage) if directory.is_run else None
    return record is not None and bool(record.effective_settings) and _has_part(run, stage)


def _has_part(run: Path, stage: str) -> bool:
    return any((run / "parts" / stage).glob("*.parquet"))


def _halt() -> None:
    while _release is None or not _release.exists():
        time.sleep(_POLL_SECONDS)


def _halt_around(owner: type, name: str, at: Callable[..., object], *, before: bool = False) -> None:
    """Have a method halt after, or before, the call for whose arguments `at` is true."""
    original = getattr(owner, name)

    @wraps(original)
    def halting(*arguments: Any, **keywords: Any) -> Any:
        if before and at(*arguments, **keywords):
            _halt()
        result = original(*arguments, **keywords)
        if not before and at(*arguments, **keywords):
            _halt()
        return result

    setattr(owner, name, halting)


def _after_part(stage: str) -> None:
    """The job of the stage, once its first part is recorded."""
    _halt_around(Parts, "write", lambda parts, *_: parts.sibling("").name == stage)


def _before_beginning(stage: str) -> None:
    """The command, before it records that the stage began, while the stage's job goes on."""
    _halt_around(
        Recorder,
        "__call__",
        lambda _, event: isinstance(event, StageStarted) and event.stage == stage,
        before=True,
    )


def _after_layer(_: str) -> None:
    """The job that computes layer by layer, once a layer's hidden states are saved."""
    from mismatch_probe.training_path.by_layer_scorer import HiddenStates

    _halt_around(HiddenStates, "end_layer", lambda states: any(states._folder.glob("[0-9]*")))


def _after_step(number: str) -> None:
    """The command, once the metrics of a step are written."""
    _halt_around(TrainingDirectory, "append_metrics", lambda _, step, metrics: step == int(number))


def _before_legs(_: str) -> None:
    """The command, before it writes a leg."""
    _halt_around(Legs, "write", lambda *_: True, before=True)


_POINTS: Final = {
    "after-part": _after_part,
    "before-beginning": _before_beginning,
    "after-layer": _after_layer,
    "after-step": _after_step,
    "before-legs": _before_legs,
}


def main(point: str, *words: str) -> None:
    from mismatch_probe import __main__ as program

    global _release
    name, detail, release, *_ = (*point.split(":"), "", "")
    _release = Path(release) if release else None
    _POINTS[name](detail)
    sys.argv = ["mismatch-probe", *words]
    program.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
