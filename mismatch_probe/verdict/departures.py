"""How far the sides of a log lie from a high-precision reference, in units of what rounding in their formats does.

The unit is an error that is known to be rounding, on the same tokens: that of the training path here, where the log was
scored with a checkpoint, else that of the log's other side. Two right sides of one checkpoint differ by less than a
factor of 4 in it (`one_sided_dtype`).
"""

from dataclasses import dataclass

import numpy as np

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_estimate
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.rounding import Floor
from mismatch_probe.stats.sequences import Floats, Reals, Sequences, difference
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.floors import FP32_AGREES_NATS
from mismatch_probe.verdict.signatures.dtype import LEAST_OCTAVES

BEYOND_FLOORS = 2.0**LEAST_OCTAVES
_CUT = 0.99
ALIKE_FLOORS = 3.0
"""Two sides that round alone lie 1.4 apart."""

SIDES = {"pi": "the trainer's side", "mu": "the sampler's side"}


@dataclass(frozen=True)
class Departures:
    """Root mean square distances in floors: of each logged side from the reference, and of both from each other.

    sides: those that the pair holds. dtypes: in which each side is said to have computed. from_checkpoint: the
    reference and the unit are those of a checkpoint that was given, not of the log. is_named: the data names what the
    sampler's side departs by.
    """

    sides: tuple[str, ...]
    floors: dict[str, Estimate]
    dtypes: dict[str, Dtype]
    apart: Estimate | None
    from_checkpoint: bool
    is_named: bool = False

    @property
    def beyond(self) -> list[str]:
        """Sides that err by more than their formats can."""
        return [side for side, floors in self.floors.items() if _surely(floors) > BEYOND_FLOORS]

    @property
    def are_alike(self) -> bool:
        """Whether no side of the log fits the checkpoint, and both depart alike, so that it is no mismatch."""
        alike = self.apart is None or self.apart.value <= ALIKE_FLOORS
        return self.from_checkpoint and len(self.beyond) == len(self.floors) and alike

    @property
    def is_other_checkpoint(self) -> bool:
        """Whether they depart alike, and for no cause that is named."""
        return self.are_alike and not self.is_named


def floors_of(
    error: Floats, log_ref: Reals, measured: tuple[Floats, Dtype], dtype: Dtype, sequences: Sequences, level: float
) -> Estimate | None:
    """The rms of an error [T] (nats) in units of rounding in `dtype`; its largest hundredth is cut to the next.

    measured: an error of rounding on the same tokens, and its format. Each response counts for itself: what a side
    departs by does not depend on how many prompts there are.
    """
    each = Sequences(sequences.offsets, np.arange(sequences.num_sequences))
    floors = np.abs(error) / _units(log_ref, measured, dtype)
    return Estimator(each, level).root_mean_square(np.minimum(floors, np.quantile(floors, _CUT)), "token")


def apart_floors(
    log_pi: Reals,
    log_mu: Reals,
    log_ref: Reals,
    measured: tuple[Floats, Dtype],
    dtypes: dict[str, Dtype],
    sequences: Sequences,
    level: float,
) -> Estimate | None:
    """The rms of what lies between two sides, in units of the coarser one's rounding."""
    coarser = max(dtypes.values(), key=lambda dtype: dtype.round_off)
    return floors_of(difference(log_pi, log_mu), log_ref, measured, coarser, sequences, level)


def beyond_format(departures: Departures | None) -> list[Cause]:
    """The bug of sides that err by more than their formats can; none where both depart alike from a checkpoint."""
    if departures is None or departures.are_alike:
        return []
    sides = [side for side in departures.sides if side in departures.beyond]
    if not sides:
        return []
    formats = " and ".join(dict.fromkeys(departures.dtypes[side].upper() for side in sides))
    return [
        Code.BEYOND_FORMAT.cause(
            sides=f"{' and '.join(SIDES[side] for side in sides)} err{'s' if len(sides) == 1 else ''}",
            formats=formats,
            evidence=_evidence(departures),
            advice=["Look at that side's temperature, template, positions and weights, and at the order of its rows."],
        )
    ]


def other_checkpoint(departures: Departures | None) -> Verdict | None:
    """The verdict where the checkpoint is not the log's; None where it is, or cannot be told."""
    if departures is None or not departures.is_other_checkpoint:
        return None
    alone = departures.apart is None
    cause = Code.OTHER_CHECKPOINT.cause(
        unless=", or its sampler is not what it is said to be" if alone else "",
        sides="the log-probs depart" if alone else "both sides depart alike",
        evidence=_evidence(departures),
        advice=["Give the checkpoint, and the adapter, that the log's step was sampled and trained with."],
    )
    return Verdict(kind="undecided", **cause.model_dump())


def _evidence(departures: Departures) -> list[str]:
    yardstick = "the training path here" if departures.from_checkpoint else "the other side"
    said = [
        f"{SIDES[side]} errs against the reference by {write_estimate(floors)} times what rounding in "
        f"{departures.dtypes[side].upper()} does, as {yardstick} measures it"
        for side, floors in departures.floors.items()
    ]
    if departures.from_checkpoint and departures.apart is not None:
        said.append(f"the two sides lie {write_estimate(departures.apart)} times that apart")
    return said


def _surely(estimate: Estimate) -> float:
    """The lower bound; of a single response, which has none, the value."""
    return estimate.value if estimate.low is None else estimate.low


def _units(log_ref: Reals, measured: tuple[Floats, Dtype], dtype: Dtype) -> Floats:
    """What rounding in a format moves each token by [T], nats."""
    if not dtype.is_16_bit:
        return np.full(log_ref.shape, FP32_AGREES_NATS)
    error, of = measured
    exact = log_ref.astype(np.float64)
    floor = Floor.measured(error, exact, np.ones(exact.shape, dtype=np.bool_))
    return np.hypot(floor.of_format(dtype.round_off / of.round_off).at(exact), FP32_AGREES_NATS)
