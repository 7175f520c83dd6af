"""What a loop gives besides arrays, of the right kind or refused: the batch, numbers by name, probes, the step."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.probe import SHIFT, SHIFT_FARTHEST, Probe
from mismatch_probe.guards.sums import Metrics, Sums

_PLAIN: Final = (str, bytes, int, float, complex, type(None))
_LAST_STEP: Final = 2**53
_LONGEST: Final = 40
_NEVER_NEGATIVE: Final = (
    "optim/grad_norm", "optim/learning_rate", "optim/loss_scale", "response/", "reward/nonfinite", "reward/std",
    "sync/weights_", "time/",
)  # fmt: skip
"""Norms, rates, scales, counts, shares and times, by their names or how these begin."""


def kind_of_value(value: object) -> str:
    """A value in a sentence: itself where it is short and plain, else its type."""
    try:
        text = repr(value) if isinstance(value, _PLAIN) else ""
    except ValueError:  # more digits than Python writes
        text = ""
    return text if 0 < len(text) <= _LONGEST else f"of the type {type(value).__name__}"


def items_of(values: Any) -> tuple[Any, ...] | None:
    """What a list, a set or the like holds; None for a value that is no collection, such as a number."""
    try:
        return tuple(values)
    except TypeError:
        return None


def actions_of(can: object) -> frozenset[ActionKind]:
    """By their names or first words.

    Raises:
        UsageError: it is no list or set of words, or there is no such action.
    """
    if isinstance(can, str):
        raise UsageError(f"can is one word, {can!r}: give a set of actions, such as {{{can!r}}}")
    words = None if isinstance(can, Mapping) else items_of(can)
    if words is None:
        raise UsageError(f"can is {kind_of_value(can)}: give a set of actions, such as {{'skip', 'stop'}}")
    return frozenset(map(_action, words))


def _action(word: object) -> ActionKind:
    kinds = [kind for kind in ActionKind if isinstance(word, str) and (word == kind or kind.startswith(f"{word}_"))]
    if not kinds:
        action_names = (*ActionKind, *(kind.partition("_")[0] for kind in ActionKind))
        hint = did_you_mean(
            word if isinstance(word, str) else "", action_names, f"; give some of {', '.join(ActionKind)}"
        )
        raise UsageError(f"can names {kind_of_value(word)}, which is no action of guards{hint}")
    return kinds[0]


def sums_of(batch: Batch | Sums | None, *, is_first: bool) -> Sums | None:
    """The sums of a step's responses.

    Raises:
        UsageError: it is no batch, its sums are of no batch, it holds no response, or is the first and holds no token.
    """
    if batch is None:
        return None
    if not isinstance(batch, Batch | Sums):
        raise UsageError(
            f"the batch is {kind_of_value(batch)}: give a Batch, such as Batch(log_pi, log_mu, mask), or the Sums of "
            "all ranks"
        )
    sums = batch.measure() if isinstance(batch, Batch) else batch
    if isinstance(batch, Sums) and (impossible := batch.impossible()) is not None:
        raise UsageError(
            f"the Sums are of no batch, for {impossible}: give what Batch(...).measure() gave, added up over ranks"
        )
    if not sums.responses:
        raise UsageError("the batch holds no response, so there is nothing to judge: give the step's responses")
    if is_first and not sums.tokens:
        raise UsageError(
            "the first batch holds no token that counts, which would leave guards off for the whole run: look at its "
            "mask"
        )
    return sums


def number_of(value: Any, name: str) -> float:
    """One number; NaN and infinity are allowed.

    Raises:
        UsageError: the value is not a number.
    """
    plain = value.detach() if hasattr(value, "detach") else value
    plain = plain.item() if isinstance(plain, np.ndarray) and plain.size == 1 else plain
    try:
        if not isinstance(plain, str | bytes | bytearray | np.ma.core.MaskedConstant) and not np.iscomplexobj(plain):
            return float(plain)
    except OverflowError as error:
        raise UsageError(f"{name} is too large for a float: give a number, or leave it out") from error
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(f"{name} is {kind_of_value(value)}, which is no number: give one number, or leave it out")


def metric_of(value: Any, metric: str, name: str) -> float:
    """The number that an input called `name` gives a metric.

    Raises:
        UsageError: it is no number, or below 0 where it cannot be.
    """
    number = number_of(value, name)
    if number < 0 and metric.startswith(_NEVER_NEGATIVE):
        raise UsageError(f"{name} is {number:g}, which cannot be below 0: give what was measured, or leave it out")
    return number


def numbers_of(metrics: Mapping[str, Any] | None) -> Metrics:
    """Metrics by their names; what is None is absent.

    Raises:
        UsageError: they are no mapping, a name is no text, or a value is no number, or below 0 where it cannot be.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics is {kind_of_value(metrics)}: give a dict of numbers by their names")
    if any(not isinstance(name, str) for name in metrics):
        raise UsageError("metrics has a name that is no text: give a dict of numbers by their names")
    return {name: metric_of(value, name, f"metrics[{name!r}]") for name, value in metrics.items() if value is not None}


def update_metrics_of(inputs: Mapping[str, Any], metrics: Mapping[str, Any] | None, *, overflows: float) -> Metrics:
    """Metrics of an update, by its inputs (`loss` and the like; None is absent) and others by their names. Whether its
    gradient is finite follows from the norm; a shift of the policy that is given counts whole unless more is said of
    it. overflows: in a row, up to the update before.
    """
    numbers = {
        f"optim/{name}": metric_of(value, f"optim/{name}", name) for name, value in inputs.items() if value is not None
    }
    numbers |= numbers_of(metrics)
    if SHIFT in numbers:
        numbers = {SHIFT_FARTHEST: 0.0} | numbers
    if "optim/grad_norm" not in numbers:
        return numbers
    is_lost = not math.isfinite(numbers["optim/grad_norm"])
    return {
        "optim/nonfinite_gradients": float(is_lost and "optim/loss_scale" not in numbers),
        "optim/overflow": float(is_lost),
        "optim/overflows_in_a_row": overflows + 1 if is_lost else 0.0,
    } | numbers


def probes_of(probe: Probe | Sequence[Probe] | None) -> Sequence[Probe]:
    """The probe of each engine; none where nothing was probed.

    Raises:
        UsageError: it is no probe, and no list of them, or an empty one.
    """
    if probe is None:
        return ()
    probes = [probe] if isinstance(probe, Probe) else probe
    if isinstance(probes, list | tuple) and not probes:
        raise UsageError("probe is an empty list: give a Probe for each engine, or leave it out")
    if not isinstance(probes, Sequence) or not all(isinstance(each, Probe) for each in probes):
        raise UsageError(
            f"probe is {kind_of_value(probe)}: give Probe(log_pi, log_mu), or a list with one for each engine"
        )
    return probes


def step_of(step: Any) -> int:
    """
    Raises:
        UsageError: it is no whole number, or larger than a step can be.
    """
    try:
        number = operator.index(step)
    except TypeError as error:
        raise UsageError(
            f"step {kind_of_value(step)} is no whole number: give a number counted from 1, or none"
        ) from error
    if isinstance(step, bool | np.bool_) or abs(number) > _LAST_STEP:
        raise UsageError(f"step {kind_of_value(step)} is no step of a run: give a number counted from 1, or none")
    return number


def flag_of(value: object, name: str) -> bool:
    """
    Raises:
        UsageError: it is neither true nor false.
    """
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{name} is {kind_of_value(value)}: give True or False")
    return bool(value)
