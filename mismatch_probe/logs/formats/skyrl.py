"""SkyRL: `dumped_data/global_step_N_training_input.pkl`, a pickle of the tensors of one step, padded on the left.

Copies of the first row fill the batch up at its end: `pad_size` in the metadata. What was chosen at each token is
padded too, or packed (`PackedTensor`, from 0.4 on): the tokens of one row behind those of another.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.errors import UsageError
from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import FileKind, step_in_name
from mismatch_probe.logs.pickles import NUMPY_NAMES, UNREAD, NumpyArray, PickleNames, StandIn, load
from mismatch_probe.logs.recorded_choices import ABSENT, kept_sets, routed_experts
from mismatch_probe.logs.row import LogFinding, Row, Tell
from mismatch_probe.logs.torch_files import TENSOR_NAMES, TorchFile, refusal
from mismatch_probe.reading import Unreadable, open_file
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.sequences import Mask

_MODULES: Final = ("skyrl.backends.skyrl_train.training_batch", "skyrl_train.training_batch")
_REBUILD: Final = "_rebuild_tensor_batch"
NAMES: Final[PickleNames] = {
    **NUMPY_NAMES,
    "torch.device": UNREAD,
    "skyrl.backends.skyrl_train.utils.packed_tensor.PackedTensor": UNREAD,
    **{f"{module}.{_REBUILD}": StandIn(lambda kind, state: state) for module in _MODULES},
    **{f"{module}.TrainingInputBatch": "TrainingInputBatch" for module in _MODULES},
    **{f"{module}.TensorFormat": StandIn(lambda name=None: name) for module in _MODULES},
}
_DTYPES: Final = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"})
_NEEDED: Final = ("sequences", "attention_mask", "response_mask", "loss_mask")
_LONGEST_NAME: Final = 4096
_EXPERTS: Final = "rollout_expert_indices"
_WITHOUT_ROUTE: Final = "router_padding_mask"
"""[B, S]: tokens whose experts were not recorded, so that the batch has others in their place."""
_SUPPORT: Final = "rollout_sample_support"
_LOG_PROBS: Final = ("rollout_logprobs", "action_log_probs", "base_action_log_probs")


def _skyrl_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    try:
        with open_file(path) as file:
            batch, num_padding_rows, trajectories = _batch(load(file.read(), NAMES))
    except FileNotFoundError as error:
        raise UsageError(f"there is no log {path}") from error
    except Unreadable as error:
        raise refusal(path, error) from error
    if num_padding_rows:
        evidence = {"file": str(path), "rows": num_padding_rows}
        tell(LogFinding.of(LogCode.PADDING_ROWS, evidence=evidence, file=path, rows=num_padding_rows))
    step = step_in_name(path)
    for index in range(len(batch["sequences"]) - num_padding_rows):
        yield _skyrl_response(
            Row(f"row {index} of {path}", {name: column[index] for name, column in batch.items()}),
            step,
            None if trajectories is None else trajectories[index],
        )


def _skyrl_response(row: Row, step: int | None, trajectory: str | None) -> LoggedResponse:
    padded_length, width = len(row.columns["sequences"]), len(row.columns["response_mask"])
    is_token = row.flags("attention_mask", padded_length)
    token_ids = row.ids("sequences")[is_token]
    own = row.flags("response_mask", width)
    length = int(own.sum())
    if length > token_ids.size or np.flatnonzero(np.diff(own.astype(np.int8))).size > 1 + (not own[:1].any()):
        raise row.refusal("response_mask is not the mask of one response inside its padding")
    start = token_ids.size - length
    experts = routed_experts(Row(row.where, {_EXPERTS: _of_tokens(row, _EXPERTS, is_token)}), _EXPERTS)
    if experts is not None and row.has(_WITHOUT_ROUTE):
        experts = np.where(row.flags(_WITHOUT_ROUTE, padded_length)[is_token][:, None, None], ABSENT, experts)
    log_mu, log_pi, log_ref = (row.numbers(name, width)[own] if row.has(name) else None for name in _LOG_PROBS)
    return LoggedResponse(
        where=row.where,
        prompt_token_ids=token_ids[:start],
        token_ids=token_ids[start:],
        sampled=row.flags("loss_mask", width)[own],
        log_mu=log_mu,
        log_pi=log_pi,
        log_ref=log_ref,
        step=step,
        trajectory=trajectory,
        num_padding=padded_length - token_ids.size,
        experts=experts,
        kept=kept_sets(Row(row.where, {_SUPPORT: _of_tokens(row, _SUPPORT, own)}), _SUPPORT),
    )


def _of_tokens(row: Row, column: str, is_token: Mask) -> npt.NDArray[Any] | None:
    """What a column holds of a row's tokens: a packed one has these alone, a padded one is as long as `is_token`."""
    values = row.columns.get(column)
    if values is None:
        return None
    if isinstance(values, _Segment):
        if len(values.array) == is_token.sum():
            return values.array
    elif len(values) == is_token.size:
        return np.asarray(values[is_token])
    raise row.refusal("the recorded choices are of other tokens than its sequences")


@dataclass(frozen=True)
class _Segment:
    """The part of a packed column that is of one row."""

    array: npt.NDArray[Any]


def _batch(state: Any) -> tuple[dict[str, npt.NDArray[Any] | list[_Segment]], int, list[str] | None]:
    """The columns [B, S] or [B, T] that are there and read, how many rows at the end are padding, and the trajectory of
    each row where a step of a trajectory is a row (`generator.step_wise_trajectories`).

    Raises:
        Unreadable: it is no batch, or its columns do not belong together.
    """
    columns = state.get("batch_dict") if isinstance(state, dict) else None
    if not isinstance(columns, dict):
        raise Unreadable("it holds no batch of SkyRL")
    names = (*_NEEDED, *_LOG_PROBS, _WITHOUT_ROUTE)
    arrays = {name: _array(columns[name]) for name in names if columns.get(name) is not None}
    if absent := [name for name in _NEEDED if name not in arrays]:
        raise Unreadable(f"it has no {absent[0]}")
    if {array.ndim for array in arrays.values()} != {2}:
        raise Unreadable("its columns are not of the same rows")
    batch: dict[str, npt.NDArray[Any] | list[_Segment]] = {**arrays}
    for name, num_axes in ((_EXPERTS, 4), (_SUPPORT, 3)):
        choices = _column_of_choices(columns.get(name), num_axes)
        if choices is not None:
            batch[name] = choices
    if len({len(array) for array in batch.values()}) != 1:
        raise Unreadable("its columns are not of the same rows")
    metadata = state.get("metadata")
    num_padding_rows = metadata.get("pad_size", 0) if isinstance(metadata, dict) else 0
    if type(num_padding_rows) is not int or not 0 <= num_padding_rows <= len(batch["sequences"]):
        raise Unreadable("its pad_size is no number of rows")
    trajectories = metadata.get("trajectory_ids") if isinstance(metadata, dict) else None
    if not isinstance(trajectories, list) or len(trajectories) < len(batch["sequences"]):
        return batch, num_padding_rows, None
    return batch, num_padding_rows, [str(name)[:_LONGEST_NAME] for name in trajectories]


def _column_of_choices(column: Any, num_axes: int) -> npt.NDArray[Any] | list[_Segment] | None:
    """A column of choices, padded to `num_axes` axes or packed; None where it is neither.

    Raises:
        Unreadable: it is damaged.
    """
    if not isinstance(column, Mapping):
        return None
    if column.get("format") != "packed_tensor":
        array = _array(column) if isinstance(column.get("data"), bytes | NumpyArray) else None
        return array if array is not None and array.ndim == num_axes else None
    values, ends = _array(column.get("values")), _array(column.get("cu_seqlens"))
    is_places = ends.ndim == 1 and ends.size > 0 and ends.dtype.kind == "i" and not (np.diff(ends) < 0).any()
    if values.ndim != num_axes - 1 or not is_places or ends[0] != 0 or ends[-1] != len(values):
        raise Unreadable("a packed column has other tokens than its cu_seqlens says")
    return [_Segment(values[start:end]) for start, end in pairwise(ends.tolist())]


def _array(column: Any) -> npt.NDArray[Any]:
    """A tensor as SkyRL pickles it: the bytes of an array, an array of numpy, or the bytes of `torch.save` where numpy
    lacks the dtype.
    """
    if isinstance(column, Mapping) and column.get("format") == "numpy_view" and isinstance(column["data"], NumpyArray):
        view = column["data"].numbers()
        if view is not None and view.dtype.name in _DTYPES:
            return view
    if not isinstance(column, Mapping) or not isinstance(column.get("data"), bytes):
        raise Unreadable("a column is no tensor")
    if column.get("format") == "torch":
        file = TorchFile(BytesIO(column["data"]), TENSOR_NAMES)
        array = file.array(file.content)
        if array is None:
            raise Unreadable("a column is no tensor")
        return array
    if column.get("dtype") not in _DTYPES:
        raise Unreadable("a column is of no dtype of numbers")
    try:
        return np.frombuffer(column["data"], np.dtype(column["dtype"])).reshape(column["shape"])
    except (ValueError, TypeError) as error:
        raise Unreadable("a column has other bytes than its shape says") from error


SKYRL: Final = Format(
    name="skyrl",
    title="SkyRL's dump of a training batch",
    holds=Holds.BOTH_SIDES,
    fits=lambda look: look.kind == FileKind.PICKLE and any(f"{module}.{_REBUILD}" in look.words for module in _MODULES),
    responses=_skyrl_responses,
)
