"""verl: the cache of `skip.rollout_tq`, `tq_batch.pt`, a file of `torch.save` with a TensorDict of jagged tensors.

Nothing of tensordict is imported: its names mean the few things that are read here.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import FileKind
from mismatch_probe.logs.pickles import UNREAD, PickleNames, StandIn, Unread
from mismatch_probe.logs.recorded_choices import routed_experts
from mismatch_probe.logs.row import Row, Tell
from mismatch_probe.logs.torch_files import TENSOR_NAMES, TorchFile, refusal, saved_file
from mismatch_probe.records.sequences import LoggedResponse

_COLUMNS: Final = ("prompts", "responses", "response_mask", "rollout_log_probs", "routed_experts")


class _JaggedTensor(NamedTuple):
    """Rows of several lengths, one behind the other: row i is values[offsets[i]:offsets[i + 1]]."""

    values: Any
    offsets: Any


def _jagged_tensor(inner: Any, *_: Any) -> _JaggedTensor:
    if inner.get("lengths") is not None:
        raise ValueError("rows with holes between them")
    return _JaggedTensor(inner["values"], inner["offsets"])


def _of_type(make: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    if not isinstance(make, StandIn):
        raise TypeError("no name that is known")
    return make(*arguments)


NAMES: Final[PickleNames] = {
    **TENSOR_NAMES,
    "__builtin__.set": StandIn(lambda *_: Unread()),
    "builtins.set": StandIn(lambda *_: Unread()),
    "tensordict._reductions._make_td": StandIn(lambda kind, state: state["_tensordict"]),
    "tensordict._td.TensorDict": "TensorDict",
    "tensordict.tensorclass.NonTensorData": Unread,
    "tensordict.tensorclass.NonTensorStack": Unread,
    "tensordict.utils._LockedSchema": Unread,
    "torch.Size": StandIn(lambda *_: Unread()),
    "torch.Tensor": "Tensor",
    "torch._dynamo.decorators._DimRange": Unread,
    "torch._tensor._rebuild_from_type_v2": StandIn(_of_type),
    "torch._utils._rebuild_nested_tensor": UNREAD,
    "torch.nested._internal.nested_tensor.NestedTensor": "NestedTensor",
    "torch.nested._internal.nested_tensor._rebuild_njt": StandIn(_jagged_tensor),
}


def _verl_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    with saved_file(path, NAMES) as file:
        step = Row(str(path), file.content).integer("global_steps")
        for number, (columns, tags, key) in sorted(enumerate(_rows(path, file)), key=_place_in_session):
            row = Row(f"sample {number} of {path}", {**tags, **columns})
            token_ids = row.ids("responses")
            yield LoggedResponse(
                where=row.where,
                prompt_token_ids=row.ids("prompts"),
                token_ids=token_ids,
                sampled=row.flags("response_mask", token_ids.size),
                log_mu=row.optional_numbers("rollout_log_probs", token_ids.size),
                step=step,
                weight_version=_verl_version(row),
                group=str(key).partition("_")[0],
                trajectory=str(key).rpartition("_")[0] if str(key).count("_") > 1 else None,
                experts=routed_experts(row, "routed_experts"),
            )


def _place_in_session(numbered_row: tuple[int, tuple[dict[str, Any], Mapping[str, Any], Any]]) -> tuple[str, int, int]:
    """What sorts rows whose keys are `UID_SESSION_NUMBER` so that the outputs of a session follow one another."""
    number, (_, _, key) = numbered_row
    session, _, place = str(key).rpartition("_")
    return session, int(place) if place.isdecimal() else 0, number


def _rows(path: Path, file: TorchFile) -> Iterator[tuple[dict[str, Any], Mapping[str, Any], Any]]:
    """The columns, the tags and the key of each sample."""
    fields, tags, keys = (file.content.get(name) for name in ("tensordict", "tags", "keys"))
    if not isinstance(fields, dict) or not isinstance(tags, list) or not isinstance(keys, list):
        raise refusal(path, "it holds no batch of verl")
    columns = {
        name: _rows_of_field(path, file, fields[name], 3 if name == "routed_experts" else 1)
        for name in _COLUMNS
        if name in fields
    }
    if {len(rows) for rows in columns.values()} != {len(tags)} or len(tags) != len(keys):
        raise refusal(path, "its columns are not of the same rows")
    for index, (tag, key) in enumerate(zip(tags, keys, strict=True)):
        yield {name: rows[index] for name, rows in columns.items()}, tag if isinstance(tag, dict) else {}, key


def _rows_of_field(path: Path, file: TorchFile, field: Any, num_axes: int) -> list[npt.NDArray[Any]]:
    if not isinstance(field, _JaggedTensor):
        raise refusal(path, "a column of it is no jagged tensor")
    values, offsets = file.array(field.values), file.array(field.offsets)
    if values is None or offsets is None or values.ndim != num_axes or offsets.ndim != 1 or offsets.dtype.kind != "i":
        raise refusal(path, "a column of it is no jagged tensor")
    ends = offsets.tolist()
    if not ends or ends[0] != 0 or ends[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise refusal(path, "a column of it has other rows than values")
    return [values[start:end] for start, end in pairwise(ends)]


def _verl_version(row: Row) -> str | None:
    """The version of the weights that all of it was sampled with, or `FIRST-LAST`."""
    first, last = row.integer("min_global_steps"), row.integer("max_global_steps")
    return None if first is None else str(first) if last in (None, first) else f"{first}-{last}"


VERL: Final = Format(
    name="verl",
    title="verl's rollout cache (tq_batch.pt)",
    holds=Holds.SAMPLER,
    fits=lambda look: look.saved_with("tensordict", "responses"),
    responses=_verl_responses,
    step_of=lambda path: int(path.parent.parent.name) if path.parent.parent.name.isdecimal() else None,
)
VERL_PROTOCOL: Final = Format(
    name="verl_protocol",
    title="verl's pickled DataProto (gen_batch.dp)",
    holds=Holds.NOTHING,
    fits=lambda look: look.kind == FileKind.PICKLE and any(word.startswith("verl.protocol") for word in look.words),
    why_not=(
        "reading it runs code of whoever wrote it; load it in verl's own environment and write the plain format, "
        "or use skip.rollout_tq, whose tq_batch.pt is read"
    ),
)
