"""A fault, and when it is there in a run: its onset, how long it lasts and the interval of checkpoints are drawn."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.training_faults.injection import Inject, Now
from mismatch_probe.causes.training import EndCause
from mismatch_probe.dtypes import Dtype

TRAINED: Final[tuple[Dtype, ...]] = (Dtype.FP16, Dtype.BF16)
FIRST_ONSET: Final = 5
"""Rules on a change have then seen four sound steps."""
LAST_ONSET: Final = 12
LONGEST_INTERVAL: Final = 8
LONGEST_HEALING: Final = 3
_SEED: Final = 27


@dataclass(frozen=True)
class Draw:
    """One run of a fault. onset: the first faulty step. every: steps between checkpoints. lasts: faulty steps, to the
    end where None. number: which draw of this fault.
    """

    number: int
    onset: int
    every: int
    lasts: int | None

    @property
    def now(self) -> Now:
        return Now(self.onset, None if self.lasts is None else self.onset + self.lasts)


@dataclass(frozen=True)
class Fault:
    """A fault at one strength.

    `guards`: any of them is right; none where the run ends with an error. `lasts`: steps it is there for, to the end
    where None. `heals`: it lasts for 1 to `LONGEST_HEALING` steps, drawn. `is_borne`: the run must go on with it, as
    with one that heals. `from_start`: it is there from step 1 on. `settings`: of the run, where the fault needs others.
    `longer`: steps that it is judged later than the others.
    """

    name: str
    strength: str
    inject: Inject
    guards: tuple[str, ...]
    causes: tuple[EndCause, ...]
    lasts: int | None = None
    heals: bool = False
    is_borne: bool = False
    from_start: bool = False
    dtypes: tuple[Dtype, ...] = TRAINED
    settings: Mapping[str, Any] = field(default_factory=dict)
    longer: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the run must not be ended for it."""
        return self.heals or self.is_borne

    @property
    def slug(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in f"{self.name} {self.strength}").split())

    def drawn(self, dtype: Dtype, number: int = 0) -> Draw:
        """Its onset, the interval of checkpoints, how long it lasts: the same for the same fault, dtype and number."""
        random = np.random.default_rng([_SEED, number, *f"{dtype} {self.slug}".encode()])
        onset = int(random.integers(FIRST_ONSET, LAST_ONSET, endpoint=True))
        every = int(random.integers(1, LONGEST_INTERVAL, endpoint=True))
        healing = int(random.integers(1, LONGEST_HEALING, endpoint=True))
        lasts = healing if self.heals and self.lasts is None else self.lasts
        return Draw(number, 1 if self.from_start else onset, every, lasts)


def at_strengths(
    name: str,
    inject: Callable[..., None],
    strengths: Mapping[str, dict[str, Any]],
    guards: tuple[str, ...],
    causes: tuple[EndCause, ...],
) -> Iterator[Fault]:
    """A fault at each of its strengths."""
    for strength, arguments in strengths.items():
        yield Fault(name, strength, partial(inject, **arguments), guards, causes)
