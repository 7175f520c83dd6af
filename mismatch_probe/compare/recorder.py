"""From the events of a run's children to its manifest."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from mismatch_probe.compare.continuation import later_settings
from mismatch_probe.compare.events import AnyEvent, BatchDone, EffectiveSettings, StageDone, StageStarted
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory

Listener = Callable[[AnyEvent], None]


class Recorder:
    """Keeps the manifest in step with the events and passes them on.

    The settings that a stage began with stay, in this run or in `earlier`, another that it is to be merged into. A part
    that runs with others later leaves a note, or is stopped by the RunDirectoryError that `later_settings` raises.
    """

    def __init__(
        self, run: RunDirectory, manifest: Manifest, listener: Listener, earlier: Mapping[str, StageRecord]
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._listener = listener
        self._earlier = earlier
        self._read_back: dict[str, dict[str, Any]] = {}
        self._idle_since = time.monotonic()

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, EffectiveSettings):
            self._read_back[event.stage] = event.settings
        elif isinstance(event, StageStarted | BatchDone | StageDone):
            record = self._manifest.stages[event.stage]
            if isinstance(event, StageStarted):
                record.state, record.batches, record.batches_done = "running", event.batches, event.batches_done
                record.start_seconds = time.monotonic() - self._idle_since
                self._settle(event.stage, record)
            elif isinstance(event, BatchDone):
                record.batches_done += 1
                record.tokens += event.tokens
                record.seconds += event.seconds
            else:
                record.state, record.note = ("skipped" if event.skipped else "done"), event.note
                self._idle_since = time.monotonic()
            self._run.write_manifest(self._manifest)
        self._listener(event)

    def _settle(self, stage: str, record: StageRecord) -> None:
        settings = self._read_back.get(stage, {})
        began = record if record.batches_done else self._earlier.get(stage, StageRecord())
        if began.effective_settings and settings:
            record.later_settings += later_settings(stage, began.effective_settings, settings)
        if began is not record:
            record.effective_settings = settings
