"""Whether the sets that a log says tokens were drawn from hold their tokens, and whether both sides are within them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.notation import write_count, write_number, write_share
from mismatch_probe.records.log_readings import KeptReading
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.sequences import Ints, is_usable

_SHIFTS: Final = (-1, 0, 1)
_FEWEST_COMPARED: Final = 100
_FEWEST_SURE: Final = 8
_FEW: Final = 0.02
_OFF_NATS: Final = 0.02
"""A log-softmax in BF16 is off by less where the probability is 1."""


@dataclass
class _KeptSums:
    tokens: int = 0
    """Sampled, of all responses."""
    cut: int = 0
    """Of these, with a set."""
    inside: Ints = field(default_factory=lambda: np.zeros(len(_SHIFTS), np.int64))
    """Of sampled tokens with a set: the token that stands here, or a place before or behind, is in it [shifts]."""
    compared: Ints = field(default_factory=lambda: np.zeros(len(_SHIFTS), np.int64))
    responses: int = 0
    misfits: int = 0
    first_misfit: str = ""
    first_outside: str = ""
    sure: dict[str, int] = field(default_factory=lambda: {"log_mu": 0, "log_pi": 0})
    """Tokens that stood alone in their sets, by the column that has a log-prob of them."""
    unsure: dict[str, int] = field(default_factory=lambda: {"log_mu": 0, "log_pi": 0})
    """Of these, whose log-prob is below 0."""
    sets_with_logprobs: int = 0
    sets_off: int = 0
    """Of these, whose probabilities do not add up to 1."""
    mass: float = 0.0


class KeptChecks:
    """Add every response, then ask."""

    def __init__(self) -> None:
        self._sums = _KeptSums()

    def add(self, response: LoggedResponse) -> None:
        sums, kept = self._sums, response.kept
        sums.tokens += int(response.sampled.sum())
        if kept is None:
            return
        sums.responses += 1
        length = response.token_ids.size
        if kept.ends.size != length:
            sums.misfits += 1
            sums.first_misfit = sums.first_misfit or response.where
            return
        sizes, owners = kept.sizes, np.repeat(np.arange(length), kept.sizes)
        has_set = response.sampled & (sizes > 0)
        sums.cut += int(has_set.sum())
        for number, shift in enumerate(_SHIFTS):
            others = np.arange(length) + shift
            is_there = has_set & (others >= 0) & (others < length)
            ids = response.token_ids[np.clip(others, 0, max(length - 1, 0))]
            is_inside = np.bincount(owners, weights=kept.ids == ids[owners], minlength=length) > 0
            sums.inside[number] += int((is_there & is_inside).sum())
            sums.compared[number] += int(is_there.sum())
            if not shift and not sums.first_outside and (is_there & ~is_inside).any():
                sums.first_outside = f"{response.where}, token {int(np.flatnonzero(is_there & ~is_inside)[0])}"
        is_alone = has_set & (sizes == 1)
        is_alone[is_alone] = kept.ids[kept.ends[is_alone] - 1] == response.token_ids[is_alone]
        for name in sums.sure:
            column = getattr(response, name)
            if column is not None:
                of_sure = column[is_alone]
                of_sure = of_sure[is_usable(of_sure)]
                sums.sure[name] += of_sure.size
                sums.unsure[name] += int((of_sure < -_OFF_NATS).sum())
        if kept.logprobs is not None and owners.size:
            mass = np.bincount(owners, weights=np.exp(np.minimum(kept.logprobs, 0)), minlength=length)[has_set]
            sums.sets_with_logprobs += mass.size
            sums.sets_off += int((np.abs(np.log(np.maximum(mass, 1e-30))) > _OFF_NATS).sum())
            sums.mass += float(mass.sum())

    def reading(self) -> KeptReading | None:
        """None where no response records sets."""
        sums = self._sums
        if not sums.responses:
            return None
        own = _SHIFTS.index(0)
        shift = 0
        if sums.compared.min() >= _FEWEST_COMPARED:
            shares = sums.inside / sums.compared
            best = int(shares.argmax())
            shift = -_SHIFTS[best] if best != own and shares[best] > shares[own] + 0.5 * (1 - shares[own]) else 0
        return KeptReading(
            num_responses=sums.responses,
            num_misfits=sums.misfits,
            num_tokens=sums.tokens,
            num_cut=sums.cut,
            num_inside=int(sums.inside[own]),
            shift=shift,
        )

    def findings(self) -> Iterator[LogFinding]:
        """What is wrong with the sets, and how many there are."""
        reading, sums = self.reading(), self._sums
        if reading is None:
            return
        yield LogFinding.of(
            LogCode.KEPT_SETS,
            "" if reading.num_cut else "none",
            evidence={"coverage": reading.coverage, "agreement": reading.agreement},
            share=write_share(reading.num_cut, reading.num_tokens),
            inside=write_share(reading.num_inside, reading.num_cut) if reading.num_cut else "none",
        )
        outside = reading.num_cut - reading.num_inside
        if reading.num_misfits:
            yield LogFinding.of(
                LogCode.KEPT_SETS_BROKEN,
                "misfit",
                evidence={"responses": reading.num_misfits},
                number=write_count(reading.num_misfits),
                total=write_count(reading.num_responses),
                first=sums.first_misfit,
            )
        if outside:
            shift_text = {0: "", 1: ": they stand one token too late", -1: ": they stand one token too early"}[
                reading.shift
            ]
            yield LogFinding.of(
                LogCode.KEPT_SETS_BROKEN,
                evidence={"tokens": outside, "of": reading.num_cut, "shift": reading.shift},
                number=write_count(outside),
                total=write_count(reading.num_cut),
                share=write_share(outside, reading.num_cut),
                late=shift_text,
                first=sums.first_outside,
            )
        for column, side in (("log_mu", "engine"), ("log_pi", "training path")):
            sure, unsure = sums.sure[column], sums.unsure[column]
            if sure >= _FEWEST_SURE and unsure > _FEW * sure:
                yield LogFinding.of(
                    LogCode.KEPT_SETS_UNUSED,
                    column=column,
                    evidence={"tokens": unsure, "of": sure},
                    side=side,
                    number=write_count(unsure),
                    total=write_count(sure),
                    share=write_share(unsure, sure),
                )
        if sums.sets_off > max(_FEW * sums.sets_with_logprobs, 2):
            yield LogFinding.of(
                LogCode.KEPT_SETS_UNUSED,
                "mass",
                column="log_mu",
                evidence={"sets": sums.sets_off, "of": sums.sets_with_logprobs},
                number=write_count(sums.sets_off),
                total=write_count(sums.sets_with_logprobs),
                mass=write_number(sums.mass / sums.sets_with_logprobs),
            )
