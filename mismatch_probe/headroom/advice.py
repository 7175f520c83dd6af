# mypy: allow-untyped-calls
"""Which modules have to compute in FP32: blamed, tried, blamed again, until the run is sound or nobody is left."""

from dataclasses import dataclass
from typing import Final

from mismatch_probe.headroom import models
from mismatch_probe.headroom.fp16 import ROUNDS_TO_INFINITY
from mismatch_probe.headroom.passes import Gradients
from mismatch_probe.headroom.ranges import ForwardRanges
from mismatch_probe.headroom.trial import Bench, Tried, fits
from mismatch_probe.headroom.watch import Operation
from mismatch_probe.headroom.weights import is_lossy

_ROUNDS: Final = 8
_MOST_IN_FP32: Final = 0.5
_SCALE_STEPS: Final = (0, 4, 8, 12, 16)


@dataclass(frozen=True)
class Seen:
    """What the plain runs showed: FP32 ranges and gradients, and which operations the FP16 run holds in FP16."""

    ranges: ForwardRanges
    gradients: Gradients
    held_in_fp16: frozenset[Operation]

    def overflowing(self) -> list[str]:
        """Modules with a result held in FP16 that FP32 knows to be too large for it."""
        return [
            operation.module
            for operation, value in self.ranges.largest().items()
            if operation in self.held_in_fp16 and not value < ROUNDS_TO_INFINITY
        ]

    def overflowing_gradients(self, exponent: int) -> list[str]:
        """Modules with a gradient, of a result or a parameter, that is too large for FP16 at that loss scale."""
        limit = ROUNDS_TO_INFINITY / 2.0**exponent
        results = [one.module for one, seen in self.gradients.operations.binades.items() if not seen.largest < limit]
        weights = [
            name.rpartition(".")[0] for name, seen in self.gradients.parameters.items() if not seen.largest < limit
        ]
        return [*results, *weights]


def try_exceptions(bench: Bench, seen: Seen, plain: Tried, bf16: Tried) -> Tried | None:
    """The FP16 run with modules in FP32 that fits, else the last one tried; None where there was nothing to try.

    A run that would hold more than half of the weights in FP32 is not tried.
    """
    layers = models.layer_names(bench.reference)
    tried, last = plain, None
    for _ in range(_ROUNDS):
        before = tried.trial.modules_in_fp32
        blamed = [models.mendable(bench.reference, module) for module in _blamed(bench, seen, tried, bf16)]
        modules = models.outermost([*before, *blamed], layers)
        if set(modules) == set(before) or _share_of_weights(bench, modules) > _MOST_IN_FP32:
            return last
        tried = last = bench.run("fp16", modules=modules, yardstick=bf16.trial)
        if fits(tried.trial, bf16.trial):
            return last
    return last


def _blamed(bench: Bench, seen: Seen, tried: Tried, bf16: Tried) -> list[str]:
    trial, limit = tried.trial, bf16.trial.logprob_error_nats
    if tried.first_nonfinite is not None:
        return [*seen.overflowing(), tried.first_nonfinite.module, *_modules_of_weights(bench, overflowing=True)]
    if trial.logprob_error_nats is not None and limit is not None and trial.logprob_error_nats > limit:
        return _modules_of_weights(bench, overflowing=False)
    for exponent in _SCALE_STEPS:
        found = seen.overflowing_gradients(exponent)
        if not {models.mendable(bench.reference, module) for module in found} <= set(trial.modules_in_fp32):
            return found
    return []


def _modules_of_weights(bench: Bench, *, overflowing: bool) -> list[str]:
    """Modules with a weight that FP16 makes infinite, or keeps less well than BF16 would."""
    return [
        name.rpartition(".")[0]
        for name, parameter in bench.reference.named_parameters()
        if (not bool(parameter.half().isfinite().all()) if overflowing else is_lossy(parameter))
    ]


def _share_of_weights(bench: Bench, modules: list[str]) -> float:
    """Of all parameters, those held in FP32 with `modules` there; a layer's residual stream holds none."""
    layers = set(models.layer_names(bench.reference))
    held = {
        parameter: parameter.numel()
        for module in modules
        if module not in layers
        for parameter in bench.reference.get_submodule(module).parameters()
    }
    return sum(held.values()) / bench.reference.num_parameters()
