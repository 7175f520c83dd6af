"""The built-in tasks: seeded problems with worked answers, whose length is set by the number of terms."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

TERM_VALUES = range(10, 100)
MAX_TERMS = 99


@dataclass(frozen=True)
class Terms:
    """Fewest and most terms of a problem, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class Problem:
    """A question, the worked answer a model learns to write, and the value that answer ends in."""

    question: str
    worked: str
    answer: str


@dataclass(frozen=True)
class Task:
    """How a task writes a problem from its terms, and how it reads the final answer out of a response."""

    name: str
    splits: dict[str, Terms]
    write: Callable[[list[int]], Problem]
    read_answer: Callable[[str], str]


@dataclass(frozen=True)
class ProblemSet:
    """A task with its number of terms and its seed fixed; problem `i` depends on nothing but these and `i`."""

    task: Task
    terms: Terms
    seed: int

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"{self.task.name}/{self.terms.low}-{self.terms.high}/{self.seed}/{index}")
        return self.task.write(rng.choices(TERM_VALUES, k=rng.randint(self.terms.low, self.terms.high)))


def verify(task: str, answer: str, response: str) -> bool:
    """Whether a response ends in the right answer; `task` is a built-in task's name, a key of `TASKS`.

    `response` is the text before the end of the turn, without special tokens. A truncated response has no final
    answer: the caller scores it as wrong whatever it ends in.
    """
    return TASKS[task].read_answer(response) == answer


def _write_sum(terms: list[int]) -> Problem:
    totals = list(accumulate(terms))
    sums = [f"{left}+{term}={total}" for left, term, total in zip(totals[:-1], terms[1:], totals[1:], strict=True)]
    return Problem(f"sum {_numbered(terms, ' ')}", _numbered([terms[0], *sums], ";"), str(totals[-1]))


def _write_copy(terms: list[int]) -> Problem:
    copied = _numbered(terms, ";")
    return Problem(f"copy {_numbered(terms, ' ')}", copied, copied)


def _numbered(items: Sequence[int | str], separator: str) -> str:
    """`1:12 2:73`: with its number before it, each term is found in one place however many there are."""
    return separator.join(f"{number}:{item}" for number, item in enumerate(items, start=1))


def _last_total(response: str) -> str:
    return response.rpartition("=")[2].strip()


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "sums",
            {"easy": Terms(2, 3), "medium": Terms(4, 6), "hard": Terms(8, 8), "long": Terms(48, 75)},
            _write_sum,
            _last_total,
        ),
        Task(
            "copy",
            {"easy": Terms(4, 4), "medium": Terms(8, 8), "hard": Terms(24, 24), "long": Terms(99, 99)},
            _write_copy,
            str.strip,
        ),
    )
}
