"""Where the time of a step goes, and what watching it costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.report.figures import over_steps as drawing
from mismatch_probe.report.training.course import Course
from mismatch_probe.report.training.summarise import finite_mean
from mismatch_probe.report.view import Heading, Panel

_PREFIX, _SUFFIX = "time/", "_seconds"
_WHOLE = "step"
_WATCHING = {"probe": "the probe", "digest": "digests of weights", "measure": "metrics", "guards": "guards"}
_WORTH_A_BAR = 0.01


@dataclass(frozen=True)
class _Phases:
    """Mean seconds of a step by phase; `other` is what no phase claims."""

    course: Course
    seconds: dict[str, float]

    @classmethod
    def of(cls, course: Course) -> Self:
        names = [name for name in course.metrics if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]
        means = {name[len(_PREFIX) : -len(_SUFFIX)]: finite_mean(course.metric(name)) or 0.0 for name in names}
        whole = means.pop(_WHOLE, 0.0)
        return cls(course, {**means, "other": max(0.0, whole - sum(means.values()))})

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    def share(self, *phases: str) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in phases) / self.whole

    @property
    def watching(self) -> str:
        """What each part of it takes of a step."""
        return ", ".join(
            f"{words} {write_number(self.seconds[phase])} s, {100 * self.share(phase):.1f} %"
            for phase, words in _WATCHING.items()
            if phase in self.seconds
        )

    def __str__(self) -> str:
        return (
            f"{self.course.label}: {', '.join(f'{name} {write_number(time)} s' for name, time in self.seconds.items())}"
        )


def phases(courses: Sequence[Course]) -> list[Panel]:
    """One drawing of the runs that recorded times; phases that take next to nothing are named under it."""
    runs = [run for run in map(_Phases.of, courses) if run.whole]
    if not runs:
        return []
    names = dict.fromkeys(name for run in runs for name in run.seconds)
    large = [name for name in names if any(run.share(name) >= _WORTH_A_BAR for run in runs)]
    small = [name for name in names if name not in large]
    sentences = ["Mean over all steps, and the share of a step."]
    if small:
        sentences.append(f"Below {write_percent(_WORTH_A_BAR)}: {', '.join(small)}.")
    costs = [f"{100 * run.share(*_WATCHING):.1f} % ({run.watching})" for run in runs]
    labels = [""] if len(runs) == 1 else [f" in {run.course.label}" for run in runs]
    sentences.append(f"Watching took {' and '.join(map(''.join, zip(costs, labels, strict=True)))}.")
    heading = Heading("plot-phases", "Where a step's time goes", "; ".join(map(str, runs)), " ".join(sentences))
    bars = [(run.course.style, {name: run.seconds.get(name, 0.0) for name in large}, run.whole) for run in runs]
    return [drawing.draw_phases(heading, bars)]
