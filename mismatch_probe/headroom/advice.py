# mypy: allow-untyped-calls
"""Which modules have to compute in FP32: blamed, tried, blamed again, until the run is sound or nobody is left."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from transformers import PreTrainedModel

from mismatch_probe.dtypes import Dtype
from mismatch_probe.headroom import models
from mismatch_probe.headroom.fp16 import LOSSY, ROUNDS_TO_INFINITY
from mismatch_probe.headroom.passes import Gradients
from mismatch_probe.headroom.ranges import ForwardRanges, squared_norm
from mismatch_probe.headroom.trial import Bench, TrialRun, fits, is_close
from mismatch_probe.headroom.watch import Operation
from mismatch_probe.records.headroom import Trial

_ROUNDS: Final = 8
_MOST_IN_FP32: Final = 0.5
_SCALE_STEPS: Final = (0, 4, 8, 12, 16)


@dataclass(frozen=True)
class Seen:
    """What the plain runs showed: FP32 ranges and gradients, and which operations the FP16 run holds in FP16."""

    ranges: ForwardRanges
    gradients: Gradients
    held_in_fp16: frozenset[Operation]

    def too_large(self) -> list[str]:
        """Modules with a result held in FP16 that overflows it."""
        largest = self.ranges.largest().items()
        return [
            operation.module
            for operation, value in largest
            if operation in self.held_in_fp16 and not value < ROUNDS_TO_INFINITY
        ]

    def too_small(self) -> list[str]:
        """Modules with results held in FP16 that BF16 would hold better."""
        errors = self.ranges.rounding_errors().items()
        return [operation.module for operation, error in errors if operation in self.held_in_fp16 and error > LOSSY]

    def gradients_too_large(self, exponent: int) -> list[str]:
        """Modules with a gradient, of a result or a parameter, that overflows FP16 at that loss scale."""
        limit = ROUNDS_TO_INFINITY / 2.0**exponent
        results = [
            operation.module
            for operation, seen in self.gradients.operations.binades.items()
            if not seen.largest < limit
        ]
        weights = [_owner(name) for name, seen in self.gradients.parameters.items() if not seen.largest < limit]
        return [*results, *weights]


def try_exceptions(
    bench: Bench, seen: Seen, plain: TrialRun, bf16: TrialRun, tell: Callable[[str], None]
) -> Trial | None:
    """The FP16 run with modules in FP32 that fits, else the last one tried; None where there was nothing to try.

    A run that would hold more than half of the weights in FP32 is not tried.
    """
    layers = models.layer_names(bench.reference)
    tried, chosen = plain, set[str]()
    for number in range(1, _ROUNDS + 1):
        blamed = {
            models.mendable(bench.reference, module) for module in _blamed(bench, seen, tried, chosen, bf16.trial)
        }
        if blamed <= chosen:
            break
        chosen |= blamed
        modules = models.outermost(chosen - set(layers))
        if _share_of_weights(bench, modules) > _MOST_IN_FP32:
            break
        residual_from = next((layer for layer in layers if layer in chosen), None)
        tell_of_try = partial(_tell_of_try, tell, number)
        tried = bench.run(Dtype.FP16, modules=modules, residual_from=residual_from, yardstick=bf16, tell=tell_of_try)
        if fits(tried.trial, bf16.trial):
            break
    return None if tried is plain else tried.trial


def _tell_of_try(tell: Callable[[str], None], number: int, how_far: str) -> None:
    tell(f"try {number} of at most {_ROUNDS}, {how_far}")


def modules_of_overflowing_weights(model: PreTrainedModel) -> list[str]:
    """Modules of an FP32 model with a weight that is infinite in FP16, whether or not a response came by it."""
    named = model.named_parameters()
    return [_owner(name) for name, weights in named if not bool(weights.half().isfinite().all())]


def _blamed(bench: Bench, seen: Seen, tried: TrialRun, chosen: set[str], bf16: Trial) -> list[str]:
    """Modules at fault for what is wrong with a run that has `chosen` in FP32."""
    trial = tried.trial
    blamed = modules_of_overflowing_weights(bench.reference)
    if tried.first_nonfinite is not None:
        return [*seen.too_large(), tried.first_nonfinite.module, *blamed]
    if not is_close(trial, bf16):
        blamed += [*seen.too_small(), *_of_lossy_weights(bench)]
    if trial.from_exponent is None:
        for exponent in _SCALE_STEPS:
            operations = seen.gradients_too_large(exponent)
            if not {models.mendable(bench.reference, module) for module in operations} <= chosen:
                return blamed + operations
    return blamed


def _of_lossy_weights(bench: Bench) -> list[str]:
    named = bench.reference.named_parameters()
    return [
        _owner(name)
        for name, weights in named
        if bool(squared_norm(weights.half().float() - weights) > LOSSY**2 * squared_norm(weights))
    ]


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _share_of_weights(bench: Bench, modules: list[str]) -> float:
    """Of all parameters, those of the modules."""
    held = {parameter for name in modules for parameter in bench.reference.get_submodule(name).parameters()}
    return sum(parameter.numel() for parameter in held) / bench.reference.num_parameters()
