"""How long work takes, by stages that were measured and by measured rates, and how far that can be trusted."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Final

from mismatch_probe.compare.cost.earlier import Measured
from mismatch_probe.compare.cost.rates import Calibration, Process, Rates, Span, Work
from mismatch_probe.compare.cost.stage_work import Kind, What
from mismatch_probe.dtypes import Dtype

FROM_RATES: Final = 4.0
"""Between a quarter and four times: arithmetic on measured rates. What was seen of each: `reports/cost-model.md`."""
FROM_THE_SAME: Final = 3.0
"""The same kind of stage was measured of the same side, of the same model on the same hardware."""
FROM_ANOTHER_SIDE: Final = 4.0
"""It was measured in another dtype, or with other settings."""
FROM_ANOTHER_KIND: Final = 6.0

_ALIKE: Final[tuple[tuple[Kind, ...], ...]] = (
    ("replay", "engine-floor", "engine-routing", "distributions", "score", "floor", "routing", "full-vocabulary"),
    ("sample", "decode-alone"),
)
"""Kinds that tell of each other where no rates were measured: passes over whole sequences, and steps of one token."""


def _in_proportion(process: Process, dtype: Dtype) -> Rates:
    """No rates, only how stages of one kind compare: a measured one gives the scale."""
    return Rates(
        process=process,
        dtype=dtype,
        device="",
        matrix_flops_per_second=1e11,
        attention_flops_per_second=1e11,
        memory_bytes_per_second=1e10,
        operation_seconds=2e-6,
        disk_bytes_per_second=1e9,
    )


@dataclass(frozen=True)
class Pace:
    """What is known of a machine: its measured rates, and stages that ran on it; either may be missing."""

    calibration: Calibration | None
    measured: Sequence[Measured]

    def span(self, what: What, work: Work) -> Span | None:
        """How long a stage takes without its start; None where nothing measured tells."""
        size = self.rates_of(what.process, what.dtype).seconds(work)
        of_process = [stage for stage in self.measured if self._tells_of(stage.what, what)]
        of_kind = [stage for stage in of_process if stage.what.kind == what.kind]
        levels = [([stage for stage in of_kind if stage.what == what], FROM_THE_SAME), (of_kind, FROM_ANOTHER_SIDE)]
        if self.calibration is None:
            alike = next(kinds for kinds in _ALIKE if what.kind in kinds)
            levels.append(([stage for stage in of_process if stage.what.kind in alike], FROM_ANOTHER_KIND))
        for known, factor in levels:
            sizes = [
                (stage, self.rates_of(stage.what.process, stage.what.dtype).seconds(stage.work)) for stage in known
            ]
            sizes = [(stage, its_size) for stage, its_size in sizes if its_size > 0]
            if sizes:
                nearest, its_size = min(sizes, key=lambda pair: abs(log(pair[1] / size)) if size else 0)
                once = nearest.seconds + (size - its_size if self.calibration else 0)
                return _between(nearest.seconds * size / its_size, once, factor)
        return None if self.calibration is None else Span.within(size, FROM_RATES)

    def has_seen(self, what: What) -> bool:
        """Whether a stage of the same kind, side and settings was measured."""
        return any(stage.what == what for stage in self.measured)

    def start_span(self, what: What) -> Span | None:
        """How long it takes from the end of the stage before to this one's first batch; None where nothing tells."""
        alike = [
            stage
            for stage in self.measured
            if (stage.what.kind, stage.what.manner) == (what.kind, what.manner) and stage.start_seconds is not None
        ]
        known = [stage for stage in alike if stage.what.dtype == what.dtype] or alike
        if not known:
            return None
        return Span.within(sum(stage.start_seconds or 0.0 for stage in known) / len(known), FROM_THE_SAME)

    def _tells_of(self, measured: What, what: What) -> bool:
        """Of a server only a server does; beside measured rates, only what ran at one of them."""
        if (measured.process == "server") != (what.process == "server"):
            return False
        return self.calibration is None or self.calibration.has(measured.process, measured.dtype)

    def rates_of(self, process: Process, dtype: Dtype) -> Rates:
        if self.calibration is None:
            return _in_proportion(process, dtype)
        return self.calibration.rates_of(process, dtype)


def _between(growing: float, once: float, factor: float) -> Span:
    """What a measured stage of another size took beyond the arithmetic grows with the size, or was spent once: both are
    in the interval. Without rates all of it may be either.
    """
    low, high = sorted((growing, once)) if once > 0 else (growing, growing)
    return Span(low_seconds=low / factor, likely_seconds=sqrt(low * high), high_seconds=high * factor)
