"""The catalogue of causes: an entry holds each cause's wire name, kind, sentence, fix, and the tests that recognise it.

`comparison.Code` are the causes of a mismatch, `training.EndCause` what ends a training run, `findings.LogCode` what a
log shows before any number is computed, `findings.HeadroomCode` whether a checkpoint fits FP16. The order in which
tests are tried is a table below the entries. This module has the form of an entry, and the registry of tests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, IntEnum, StrEnum, auto
from typing import Any, Final, Generic, Literal, Self, TypeVar

VerdictKind = Literal["clean", "precision", "bug", "broken", "undecided"]
"""How a verdict is to be taken."""


class SeenIn(Flag):
    """What a test that recognises the cause is computed from."""

    COUNTS = auto()
    """Token ids, dtypes read back and counts of what is missing, before any number is computed."""
    ARRAYS = auto()
    """Both sides' log-probs of every token (`verdict.signatures`)."""
    SETTINGS = auto()
    """Effective settings, checkpoints and what a server answered (`verdict.preflight`)."""
    PASSES = auto()
    """Forward passes of a checkpoint over a log (`explain`)."""
    SUMS = auto()
    """The metrics of a training run's steps (`guards`)."""


class CauseRank(IntEnum):
    """What speaks for a cause, the strongest first: of several causes of a bug, the one of the first rank is named."""

    OTHER_WEIGHTS = auto()
    """A setting says that the sides hold other weights, which explains any shape of the data."""
    SHAPE = auto()
    """The data has a shape that only this cause gives it."""
    EXPERTS = auto()
    """The two sides chose other experts."""
    SETTING = auto()
    """A setting differs between the sides, and the data has no shape of its cause."""
    ROUNDING = auto()
    """A setting rounds one side, and that side errs more."""
    PLACE = auto()
    """Deviations lie where this cause puts them, which a few large ones of another cause can look like.

    Counts as SHAPE while no setting is known to differ, and where one is known that makes this very cause."""
    ELIMINATION = auto()
    """No other cause is known. Holds only while no setting is known to differ or to round one side."""


@dataclass(frozen=True)
class Words:
    """The sentence of a cause, and what fixes it; names in braces are figures of the case."""

    sentence: str
    fix: str | tuple[str, ...] = ()


@dataclass(frozen=True)
class CauseEntry(Words):
    """One cause of the catalogue."""

    name: str = field(kw_only=True)
    """The code in JSON."""
    variants: Mapping[str, Words] = field(default_factory=dict, kw_only=True)
    """Other words for the same cause, by how it was recognised."""
    docs: str = field(default="docs/causes.md", kw_only=True)
    """The page with its section."""


_OF_ONE: Final = (
    ("log-probs are", "log-prob is"),
    ("responses were", "response was"),
    ("responses have", "response has"),
)
"""What a template says of many, and of one."""


class Catalogued(StrEnum):
    """A member is its code in JSON; `entry` is what the catalogue holds of it."""

    entry: CauseEntry

    def __new__(cls, entry: CauseEntry) -> "Catalogued":
        member = str.__new__(cls, entry.name)
        member._value_ = entry.name
        member.entry = entry
        return member

    @classmethod
    def by_name(cls, code: str) -> Self:
        """The member of a code in JSON; a KeyError for one that the catalogue does not have."""
        return {str(member): member for member in cls}[code]

    @property
    def template(self) -> str:
        """The sentence, with names of figures in braces."""
        return self.entry.sentence

    def sentence(self, variant: str = "", /, **figures: object) -> str:
        """The sentence filled in."""
        sentence = self._words(variant).sentence.format(**figures)
        if figures.get("count") == 1:
            for many, single in _OF_ONE:
                sentence = sentence.replace(f"1 {many} ", f"1 {single} ")
        return sentence

    def fix(self, variant: str = "", /, **figures: object) -> list[str]:
        """What fixes it, filled in."""
        fix = self._words(variant).fix
        return [line.format(**figures) for line in ((fix,) if isinstance(fix, str) else fix)]

    def _words(self, variant: str) -> Words:
        return self.entry.variants[variant] if variant else self.entry


Test = TypeVar("Test", bound=Callable[..., Any])
Sign = str | tuple[str, str]
"""A cause, or a cause and which of its several tests."""


class OrderedTests(Generic[Test]):
    """Tests of one kind, registered where they are written and tried in the order of a table of signs.

    `@tests.of(CAUSE)` registers a function. A test that the table lacks, or a line of it without a test, is an error
    of the program.
    """

    def __init__(self, order: Sequence[Sign]) -> None:
        self._order = order
        self._tests: dict[Sign, Test] = {}

    def of(self, *signs: Sign) -> Callable[[Test], Test]:
        def register(test: Test) -> Test:
            for sign in signs:
                if sign not in self._order or sign in self._tests:
                    raise LookupError(f"{sign} must be in the table of its order, and have one test")
                self._tests[sign] = test
            return test

        return register

    def __iter__(self) -> Iterator[Test]:
        return iter([self._tests[sign] for sign in self._order])
