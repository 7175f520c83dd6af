"""Trackers get every step under our names and other frameworks', and their failures end no run."""

import importlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.train import Tracker, TrainSettings
from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.guards.diagnosis import StepFirings
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train import trackers
from mismatch_probe.train.trackers import GuardedTracker, track
from tests.report.training.training_runs import TrainingSample, training_run


@pytest.fixture
def directory(tmp_path: Path) -> TrainingDirectory:
    return training_run(tmp_path / "run", TrainingSample(steps=5))


def settings_of(directory: TrainingDirectory, *names: Tracker) -> TrainSettings:
    return directory.read_training_manifest().settings.model_copy(update={"report_to": names})


def send_steps(directory: TrainingDirectory, name: Tracker, first: int = 1) -> list[str]:
    """Send the recorded steps from `first` on; returns what the user was told."""
    messages: list[str] = []
    with track(directory, settings_of(directory, name), messages.append) as send:
        for step, metrics in directory.read_metrics():
            if step >= first:
                send(step, metrics, StepFirings(step))
    return messages


def scalars(directory: TrainingDirectory, name: str) -> dict[int, float]:
    """What TensorBoard itself reads from the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory.path / "tensorboard"))
    found.Reload()
    return {event.step: event.value for event in found.Scalars(name)}


class Recorder:
    """A tracker as the protocol asks for it: keeps what it is told, and fails where it is asked to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: dict[int, Mapping[str, float]] = {}
        self.closed = False
        self._fails_at = fails_at

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("the server is gone")
        self.steps[step] = metrics

    def close(self) -> None:
        self.closed = True


def test_without_a_tracker_nothing_is_imported_and_nothing_is_sent(directory: TrainingDirectory) -> None:
    with track(directory, settings_of(directory), pytest.fail) as send:
        send(1, {"reward/mean": 1.0}, StepFirings(1))
    assert not (directory.path / "tensorboard").exists()


@pytest.mark.slow
def test_tensorboard_reads_every_step_under_our_names_and_the_aliases(directory: TrainingDirectory) -> None:
    assert send_steps(directory, "tensorboard") == []
    recorded = {step: metrics["mismatch/kl_k3"] for step, metrics in directory.read_metrics()}
    for name in ("mismatch/kl_k3", "rollout_corr/k3_kl", "mismatch_kl/all/mean"):
        assert scalars(directory, name) == pytest.approx(recorded, rel=1e-6)


def test_tensorboard_keeps_what_is_not_finite_as_it_is(tmp_path: Path) -> None:
    broken = TrainingSample(steps=2, changes={2: {"reward/mean": math.nan}})
    directory = training_run(tmp_path / "run", broken)
    send_steps(directory, "tensorboard")
    assert math.isnan(scalars(directory, "reward/mean")[2])


@pytest.mark.slow
def test_a_resumed_run_shows_each_step_once(directory: TrainingDirectory) -> None:
    send_steps(directory, "tensorboard")
    send_steps(directory, "tensorboard", first=3)
    assert list(scalars(directory, "reward/mean")) == [1, 2, 3, 4, 5]


def test_the_settings_stand_beside_the_curves(directory: TrainingDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send_steps(directory, "tensorboard")
    found = EventAccumulator(str(directory.path / "tensorboard"))
    found.Reload()
    [event] = found.Tensors("settings/text_summary")
    assert b"sums:terms=3" in event.tensor_proto.string_val[0]


def recorded_by(recorder: Recorder, messages: list[str]) -> GuardedTracker:
    guarded = GuardedTracker("wandb", messages.append)
    guarded.open(lambda name: recorder)
    return guarded


def test_a_tracker_that_fails_is_named_once_and_asked_no_more() -> None:
    recorder, messages = Recorder(fails_at=3), list[str]()
    guarded = recorded_by(recorder, messages)
    for step in range(1, 6):
        guarded.act(lambda run, step=step: run.log(step, {"reward/mean": 0.5}))
    guarded.act(lambda run: run.close())
    assert list(recorder.steps) == [1, 2]
    assert not recorder.closed
    [sentence] = messages
    assert "wandb failed (ConnectionError: the server is gone); the run goes on" in sentence


def test_a_tracker_that_works_is_closed_and_nothing_is_said() -> None:
    recorder, messages = Recorder(), list[str]()
    guarded = recorded_by(recorder, messages)
    guarded.act(lambda run: run.log(1, {}))
    guarded.act(lambda run: run.close())
    assert recorder.closed
    assert messages == []


def test_a_tracker_that_cannot_start_is_named_and_the_run_starts() -> None:
    def start(name: Tracker) -> Recorder:
        raise TimeoutError("no answer")

    messages: list[str] = []
    guarded = GuardedTracker("trackio", messages.append)
    guarded.open(start)
    guarded.act(lambda run: run.log(1, {}))
    assert messages == [
        "trackio failed (TimeoutError: no answer); the run goes on without it, metrics.jsonl has every step"
    ]


def test_what_the_user_has_to_mend_stops_the_start() -> None:
    def start(name: Tracker) -> Recorder:
        raise UsageError("log in first")

    with pytest.raises(UsageError, match="log in first"):
        GuardedTracker("wandb", pytest.fail).open(start)


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_what_installs_it(
    name: Tracker, directory: TrainingDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr(trackers, "import_module", refuse)
    with (
        pytest.raises(MissingExtra, match=rf"--report-to {name} .*pip install 'mismatch-probe\[trackers\]'"),
        track(directory, settings_of(directory, name), pytest.fail),
    ):
        pytest.fail("the run must not start")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.slow
def test_wandb_takes_every_step_offline(directory: TrainingDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert send_steps(directory, "wandb") == []
    [record] = directory.path.glob("wandb/offline-run-*/*.wandb")
    written = record.read_bytes()
    assert written.count(b"rollout_corr/k3_kl") >= 5
    assert b"sums:terms=3" in written


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
@pytest.mark.slow
def test_trackio_takes_every_step(
    directory: TrainingDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert send_steps(directory, "trackio") == []
    assert list((tmp_path / "trackio").glob("*.db"))
