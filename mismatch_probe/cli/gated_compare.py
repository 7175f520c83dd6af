"""`compare --gate`: judge the run at each declared look, and extend it for as long as the answer is open."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mismatch_probe.cli.gate_answers import Outputs, judge_run
from mismatch_probe.cli.progress import progress_listener
from mismatch_probe.compare.cost.clock import run_clock
from mismatch_probe.compare.extension import extend_run
from mismatch_probe.compare.preparation import prepare
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.gate.config import GateFile
from mismatch_probe.gate.run import open_gate
from mismatch_probe.records.findings import Findings, file_name
from mismatch_probe.records.gate_result import GateResult, Look
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.tasks import num_held


@dataclass(frozen=True)
class GatedCompare:
    """The gate of a comparison; made before anything is sampled, so that a bad gate file costs nothing."""

    path: Path
    baseline: Path | None
    without_baseline: bool
    gate: GateFile

    @classmethod
    def open(cls, path: Path, baseline: Path | None, *, without_baseline: bool) -> "GatedCompare":
        """Read the gate file.

        Raises:
            UsageError: it cannot be used, or asks for a baseline that is not given.
        """
        gate = open_gate(path, baseline, "--gate", without_baseline=without_baseline)
        return cls(path, baseline, without_baseline, gate)

    @property
    def flags(self) -> list[object]:
        """Those that gave it."""
        baseline = ["--without-baseline"] if self.without_baseline else []
        return ["--gate", self.path, *(baseline if self.baseline is None else ["--baseline", self.baseline])]

    def settings_to_start(
        self, settings: CompareSettings, recorded: RunDirectory | None, console: Console
    ) -> CompareSettings:
        """`settings` with at least the prompts that the first look needs, or with those of the run that is continued:
        how many it has by now is the gate's doing, whatever the flags say.

        Raises:
            UsageError: the gate asks for what `compare` does not find, and it is not filed with the run yet; or the
                prompts are too few for its first look, or for a pass.
        """
        if self.gate.filed:
            self._require_filed(recorded)
        if recorded is None:
            looks = self.gate.settings.looks
            self._require_prompts(settings, looks[0])
            if missing := self._missing(settings, looks[-1]):
                console.print(f"The last look cannot be reached: {missing}", soft_wrap=True)
            return self._with_sequences(settings, looks[0], console)
        return _with_prompts(settings, recorded.read_manifest().settings.prompts.num_prompts)

    def run(self, run: RunDirectory, console: Console, publish: Callable[[], object]) -> GateResult:
        """Judge; while the answer is open and another look is declared, add prompts, `publish`, and judge again.

        Raises:
            MismatchProbeError: nothing can be decided, or an extension failed; what was computed is kept.
        """
        while True:
            outputs = Outputs(shown=False)
            result = judge_run(run.path, self.path, self.baseline, outputs, without_baseline=self.without_baseline)
            settings = run.read_manifest().settings
            wanted = None if result.look is None else self._wanted(result.look, settings)
            if result.answer != "inconclusive" or self.gate.settings.on_inconclusive != "extend" or wanted is None:
                return result
            num_recorded = settings.prompts.num_prompts or 0
            try:
                self._require_prompts(settings, wanted)
                settings = self._with_sequences(settings, wanted, console)
                preparation = prepare(settings)
            except UsageError as error:
                console.print(f"The run cannot be extended: {error}", soft_wrap=True, markup=False)
                return result
            console.print("The gate is undecided so far, so the run is extended")
            clock = run_clock(preparation, run, first_prompt=num_recorded)
            with progress_listener(console, run, clock) as listener:
                extend_run(run, preparation, listener)
            publish()

    def _wanted(self, look: Look, settings: CompareSettings) -> int | None:
        """Sequences of the next look; after the last, what there is where a pass needs more prompts than were given."""
        if look.next_sequences is None and (settings.prompts.num_prompts or 0) < self.gate.settings.min_prompts:
            return look.num_sequences
        return look.next_sequences

    def _require_filed(self, recorded: RunDirectory | None) -> None:
        asked = {check.metric.partition("_")[0]: check for check in self.gate.filed}
        there = Findings(recorded.path).documents() if recorded is not None else []
        filed = {file_name(document).partition(".")[0].partition("-")[0] for document in there}
        for command, check in asked.items():
            if command not in filed:
                raise UsageError(
                    f"{self.path} asks for {check}, which {command} finds and compare does not: take the check out, "
                    f"or give {command} the finished run (--run) and judge that with `mismatch-probe gate`"
                )

    def _with_sequences(self, settings: CompareSettings, wanted: int, console: Console) -> CompareSettings:
        given = settings.prompts.num_prompts
        needed = self._needed(settings, wanted)
        if given is not None and needed <= given:
            return settings
        instead = "" if given is None else f" instead of {given}"
        what = f"looks at {wanted} sequences and passes from {self.gate.settings.min_prompts} prompts on"
        console.print(f"The gate {what}: {needed} prompts{instead}", soft_wrap=True)
        return _with_prompts(settings, needed)

    def _needed(self, settings: CompareSettings, num_sequences: int) -> int:
        return self.gate.settings.prompts_for(num_sequences, settings.sampling.samples_per_prompt)

    def _require_prompts(self, settings: CompareSettings, wanted: int) -> None:
        """
        Raises:
            UsageError: the source holds fewer prompts than a look at so many sequences takes.
        """
        missing = self._missing(settings, wanted)
        if missing:
            raise UsageError(missing)

    def _missing(self, settings: CompareSettings, wanted: int) -> str:
        """What a look at so many sequences lacks and how it is mended; empty where it lacks nothing."""
        source, least = settings.prompts.source, self.gate.settings.min_prompts
        needed = self._needed(settings, wanted)
        held = num_held(source, needed)
        if held is None or held >= needed:
            return ""
        if held < least:
            return (
                f"{source} holds {held} prompts, and a pass of {self.path} needs {least}, however many responses they "
                "have; give --prompts a source of more, or lower min_prompts and be wrong more often"
            )
        given, enough = held * settings.sampling.samples_per_prompt, math.ceil(wanted / held)
        return (
            f"{self.path} looks at {wanted} sequences, and the {held} prompts of {source} give {given}; start with "
            f"--samples-per-prompt {enough}, or give --prompts a source of more"
        )


def _with_prompts(settings: CompareSettings, num_prompts: int | None) -> CompareSettings:
    return settings.model_copy(update={"prompts": settings.prompts.model_copy(update={"num_prompts": num_prompts})})
