"""What the guards of some runs did: a drawing of every firing, and the table of what each saw."""

from collections.abc import Sequence

from markupsafe import Markup

from mismatch_probe.notation import write_count
from mismatch_probe.report.figures.firings import Effect, Mark, draw_firings
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.names import listed
from mismatch_probe.report.training.course import Course, Firing
from mismatch_probe.report.training.guard_words import actions_words, firing_words, off_words, times
from mismatch_probe.report.view import Block, Cell, Figure, Heading, Note, Panel, Section, Table

_MOST_FIRINGS = 100


def guards(courses: Sequence[Course]) -> Section:
    blocks: list[Block] = []
    silent = [course.label for course in courses if not course.firings]
    if silent:
        blocks.append(Note("No guard fired." if len(courses) == 1 else f"No guard fired in {listed(silent)}."))
    blocks += [
        Note(visible(f"{'' if len(courses) == 1 else f'{course.label}: '}{off_words(course.manifest.guards_off)}"))
        for course in courses
        if course.manifest.guards_off
    ]
    fired = [course for course in courses if course.firings]
    if fired:
        blocks.append(_figure(fired, alone=len(courses) == 1))
    for course in fired:
        if len(course.firings) > _MOST_FIRINGS:
            blocks.append(
                Note(
                    f"{course.label}: the table has the first {_MOST_FIRINGS} of {len(course.firings)} firings, the "
                    "drawing and events.jsonl have all."
                )
            )
    return Section(
        "guards",
        "What the guards did",
        "Guards look at every step's metrics before its update is applied, and ask for more each time that they fire.",
        blocks,
    )


def _figure(courses: Sequence[Course], *, alone: bool) -> Figure:
    return Figure(
        "figure-guards",
        "How to read it: rings are firings that only warned, diamonds those that changed the run, crosses those that "
        "stopped it. Point at one to see what the guard saw and what it asked for.",
        [_panel(course, alone=alone) for course in courses],
        [_firings(course) for course in courses],
    )


def _panel(course: Course, *, alone: bool) -> Panel:
    heading = Heading(
        f"plot-guards-{course.key}",
        "Firings" if alone else f"Firings in {course.label}",
        "; ".join(
            f"{firing.guard} at step {firing.step}: {'. '.join(firing_words(firing))}"
            for firing in course.firings[:_MOST_FIRINGS]
        ),
    )
    last = max([firing.step for firing in course.firings] + [int(step) for step in course.steps[-1:]])
    marks = [Mark(firing.guard, firing.step, _effect(firing), firing_words(firing)) for firing in course.firings]
    return draw_firings(heading, marks, last)


def _effect(firing: Firing) -> Effect:
    if firing.stopped_the_run:
        return "stopped"
    return "changed" if firing.changed_the_run else "told"


def _firings(course: Course) -> Table:
    rows: list[list[Cell]] = [
        [
            write_count(firing.step),
            Markup("<code>{}</code>").format(visible(firing.guard)),
            visible(firing.sentence),
            visible(actions_words(firing.actions)),
        ]
        for firing in course.firings[:_MOST_FIRINGS]
    ]
    columns = ["step", "guard", "what it saw", "what it asked for"]
    fired = len(course.firings)
    caption = f"{course.label}: guards fired {times(fired)}"
    return Table(caption, columns, rows, text_columns=frozenset({1, 2, 3}), stacked=True)
