"""prime-rl: its token exports and its traces.

`token_exports/step_N/rank_R.jsonl` has one packed sequence a line; index i of a row is about token i. The first token
of a sequence has no log-prob: its place holds a filler, or a number of the sequence packed before.

`rollouts/step_N/KIND/SUBSET/traces.jsonl` has an episode a line: traces of nodes that each add tokens. A path from the
root to a leaf is a sequence. What the policy sampled on a stretch that several paths share counts in the first of them.
`logprobs` and the columns beside it have a number for each token that the mask names, of four decimals; a node that no
trainer saw has none of its. An agent that is not trained sampled nothing of the policy's.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import FileLook
from mismatch_probe.logs.row import Row, Tell, read_lines, split_by_mask
from mismatch_probe.records.sequences import FloatArray, LoggedResponse

_SCHEMA: Final = 1
_STABLE: Final = "STABLE"


def _is_export(look: FileLook) -> bool:
    return look.lines_with("schema_version", "token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")


def _export_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for row in read_lines(path, tell):
        if row.integer("schema_version") != _SCHEMA:
            raise row.refusal(f"its schema_version is another than {_SCHEMA}, which is read")
        token_ids = row.ids("token_ids")
        length = token_ids.size
        own = row.flags("loss_mask", length)
        yield split_by_mask(
            where=row.where,
            token_ids=token_ids,
            own=own,
            sampled=own,
            log_mu=_without_first(row.numbers("inference_logprobs", length)),
            log_pi=_without_first(row.numbers("trainer_logprobs", length)),
            entropy_nats=row.optional_numbers("entropy", length),
            step=row.integer("step"),
        )


def _without_first(log_probs: FloatArray) -> FloatArray:
    log_probs = log_probs.copy()
    log_probs[:1] = np.nan
    return log_probs


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step_(\d{1,15})", path.parent.name)
    return int(match[1]) if match else None


def _complete(path: Path) -> bool | None:
    """prime-rl marks a step's folder once every rank has written all of it."""
    return None if _step_of(path) is None else (path.parent / _STABLE).exists()


PRIME_RL: Final = Format(
    name="prime_rl",
    title="prime-rl's token export",
    holds=Holds.BOTH_SIDES,
    fits=_is_export,
    responses=_export_responses,
    step_of=_step_of,
    complete=_complete,
)


_LONGEST_PATHS: Final = 10**7
"""Nodes on all paths of a trace: one that is made to have many long paths is refused."""


def _trace_responses(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for episode in read_lines(path, tell):
        step, version = _work(episode)
        group = episode.inside("group").text("id") if episode.has("group") else None
        for number, trace in enumerate(episode.rows("traces")):
            trajectory = f"trace {number} of {trace.where}"
            is_trained = not trace.has("agent") or trace.inside("agent").columns.get("trainable") is not False
            nodes = trace.rows("nodes")
            calls = _calls_of_nodes(trace)
            indices: set[int] = set()
            for along in _paths(trace, nodes):
                fresh = [(nodes[index], is_trained and index not in indices) for index in along]
                response = _of_path(trace, fresh, step, version, group)
                own_calls = [calls[index] for index in along if index in calls]
                yield replace(response, trajectory=trajectory, **_fields_of_calls(own_calls))
                indices.update(along)


def _of_path(
    trace: Row, along: Sequence[tuple[Row, bool]], step: int | None, version: str | None, group: str | None
) -> LoggedResponse:
    ids = [node.ids("token_ids") for node, _ in along]
    masks = [node.flags("mask", part.size) for (node, _), part in zip(along, ids, strict=True)]
    return split_by_mask(
        where=trace.where,
        token_ids=np.concatenate(ids),
        own=np.concatenate(masks),
        sampled=np.concatenate([mask & fresh for mask, (_, fresh) in zip(masks, along, strict=True)]),
        log_mu=_spread("logprobs", along, masks),
        log_pi=_spread("trainer_logprobs", along, masks),
        log_ref=_spread("reference_logprobs", along, masks),
        entropy_nats=_spread("entropies", along, masks),
        step=step,
        weight_version=version,
        group=group,
    )


def _calls_of_nodes(trace: Row) -> dict[int, Row]:
    """The call that made each node, by the node's index."""
    calls = trace.rows("calls") if trace.has("calls") else []
    return {node: call for call in calls if (node := call.integer("node")) is not None}


def _fields_of_calls(calls: Sequence[Row]) -> dict[str, Any]:
    """The temperature and the model, where all calls of a path have the same, and how the last call ended."""
    sampling = [call.inside("sampling") if call.has("sampling") else Row(call.where, {}) for call in calls]
    temperatures = {each.number("temperature") for each in sampling}
    models = {call.text("model") for call in calls}
    return {
        "temperature": temperatures.pop() if len(temperatures) == 1 else None,
        "model": models.pop() if len(models) == 1 else None,
        "finish_reason": calls[-1].text("finish_reason") if calls else None,
    }


def _spread(column: str, along: Sequence[tuple[Row, bool]], masks: Sequence[np.ndarray]) -> FloatArray | None:
    """A column of the sampled tokens, NaN at the others; None where no node has it."""
    values = [np.full(mask.size, np.nan) for mask in masks]
    has_values = False
    for (node, _), mask, part in zip(along, masks, values, strict=True):
        if node.columns.get(column):
            part[mask] = node.numbers(column, int(mask.sum()))
            has_values = True
    return np.concatenate(values) if has_values else None


def _paths(trace: Row, nodes: Sequence[Row]) -> Iterator[list[int]]:
    """The indices of the nodes from the root to each leaf."""
    parents = [node.integer("parent") for node in nodes]
    depths: list[int] = []
    for index, parent in enumerate(parents):
        if parent is not None and parent >= index:
            raise trace.refusal(f"parent of node {index} is {parent}, which does not come before it")
        depths.append(1 if parent is None else depths[parent] + 1)
    leaves = sorted(set(range(len(nodes))) - set(parents))
    if sum(depths[leaf] for leaf in leaves) > _LONGEST_PATHS:
        raise trace.refusal("its paths are too many and too long")
    for leaf in leaves:
        along: list[int] = []
        at: int | None = leaf
        while at is not None:
            along.append(at)
            at = parents[at]
        yield along[::-1]


def _work(episode: Row) -> tuple[int | None, str | None]:
    """The training step, and the version of the weights or `FIRST-LAST`."""
    work = episode.inside("run").inside("work") if episode.has("run") and episode.inside("run").has("work") else None
    if work is None:
        return None, None
    if not work.has("policy"):
        return work.integer("step"), None
    first, last = (work.inside("policy").integer(end) for end in ("start", "end"))
    return work.integer("step"), str(first) if first == last else f"{first}-{last}"


PRIME_RL_TRACES: Final = Format(
    name="prime_rl_traces",
    title="prime-rl's traces",
    holds=Holds.BOTH_SIDES,
    fits=lambda look: look.lines_with("task", "env") and look.objects_with("traces", "nodes"),
    responses=_trace_responses,
    step_of=lambda path: None,
)
