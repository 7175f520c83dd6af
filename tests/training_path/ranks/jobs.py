"""What ranks of the tests do in their processes, with faults that one of them has."""

import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import Job, RankPlace, in_place, places_here, run_together
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import StorageError
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import precision, rank_group, rank_sharding, scorer
from mismatch_probe.training_path.scorer import RanksScorer, follow

_LONG = 600.0


def score_over_ranks(
    ranks: int,
    checkpoint: Path,
    dtype: Dtype,
    settings: TrainingPathSettings,
    batches: Sequence[Sequence[TokenSequence]],
    *,
    fault: str = "",
    **named: Any,
) -> tuple[list[ScoredSequence], dict[str, Any]]:
    """Scores of the batches, and the effective settings; `fault` is what the last rank does wrong."""
    sequences = [[asdict(sequence) for sequence in batch] for batch in batches]
    arguments = [str(checkpoint), dtype.value, settings.model_dump(mode="json"), sequences, named]
    with places_here(ranks) as places:
        functions = [leads, *[follows] * (ranks - 1)]
        jobs = [
            in_place(Job("scoring", function, (arguments, fault), "training", ""), place)
            for function, place in zip(functions, places, strict=True)
        ]
        scored, effective = run_together(jobs[0], jobs[1:], lambda message: None)
    return [_from_json(one) for one in scored], effective


def leads(send: Send, arguments: list[Any], fault: str, place: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    checkpoint, dtype, settings, batches, named = arguments
    if fault in _ON_EVERY_RANK or fault in _OF_THE_FIRST:
        {**_ON_EVERY_RANK, **_OF_THE_FIRST}[fault]()
    rank_group.join(RankPlace.from_json(place))
    rounded = named.pop("rounded_to", None)
    load = (Path(checkpoint), Dtype(dtype), TrainingPathSettings.model_validate(settings))
    with RanksScorer(*load, rounded_to=None if rounded is None else Dtype(rounded), **named) as ranked:
        passes = _counted_passes()
        together = ranked.score_together([[TokenSequence(**row) for row in batch] for batch in batches])
        scored = [one for batch in together for one in batch]
        effective = {**ranked.effective_settings(), "at_once": ranked.batches_at_once, "passes_here": len(passes)}
    rank_group.dismiss()
    return [_to_json(one) for one in scored], effective


def _counted_passes() -> list[int]:
    """The rows of each pass that this rank computes from now on."""
    passes, score = [], scorer.Scorer._score_padded

    def counted(self: scorer.Scorer, head: Any, sequences: list[TokenSequence], pad_id: int) -> list[ScoredSequence]:
        passes.append(len(sequences))
        return score(self, head, sequences, pad_id)

    scorer.Scorer._score_padded = counted  # type: ignore[method-assign]
    return passes


def follows(send: Send, arguments: list[Any], fault: str, place: dict[str, Any]) -> None:
    if fault in _ON_EVERY_RANK:
        _ON_EVERY_RANK[fault]()
    elif place["rank"] == place["ranks"] - 1 and fault not in _OF_THE_FIRST:
        _FAULTS[fault]()
    follow(RankPlace.from_json(place))


def _load_whole() -> None:
    """A version of transformers that takes what it is told, and does nothing with it."""
    precision.loading_arguments = lambda config, settings: {}  # type: ignore[assignment]


def _have_older_transformers() -> None:
    """In the module that the package holds: transformers, as it loads, puts a second one in its place."""
    rank_sharding.transformers.DistributedConfig = None
    loading_arguments = precision.loading_arguments

    def asked_earlier(*arguments: Any) -> dict[str, Any]:
        loaded_with = loading_arguments(*arguments)
        assert "distributed_config" not in loaded_with, "the fault did not reach the package"
        return loaded_with

    precision.loading_arguments = asked_earlier


def _hold_another_part() -> None:
    load = scorer.load_training_model

    def load_wrong(*arguments: Any, **named: Any) -> Any:
        model, arithmetic = load(*arguments, **named)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1)
        return model, arithmetic

    scorer.load_training_model = load_wrong


def _on_scoring(act: Any) -> Any:
    def inject() -> None:
        scorer.Scorer.score_together = act  # type: ignore[method-assign]

    return inject


def _be_killed(*arguments: Any, **named: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(*arguments: Any, **named: Any) -> Any:
    raise StorageError("the disk of this rank is full; free some")


def _hang(*arguments: Any, **named: Any) -> None:
    time.sleep(_LONG)


def _hang_in_leaving() -> None:
    rank_group._LEAVING_SECONDS = 1.0  # type: ignore[misc]
    dist.destroy_process_group = _hang


def _hang_before_leaving() -> None:
    rank_group.leave = _hang


def answers_and_hangs(send: Send) -> str:
    """What is done once the answer is told: as at the end of an interpreter of its own."""
    logging.shutdown = _hang
    return "done"


_ON_EVERY_RANK = {"loads whole": _load_whole, "older transformers": _have_older_transformers}
_FAULTS = {
    "": lambda: None,
    "holds another part": _hold_another_part,
    "is killed": _on_scoring(_be_killed),
    "raises": _on_scoring(_raise),
    "hangs in leaving": _hang_in_leaving,
    "hangs before leaving": _hang_before_leaving,
}
_OF_THE_FIRST = {"the first hangs in leaving": _hang_in_leaving}


def _to_json(one: ScoredSequence) -> list[Any]:
    assert one.top1_ids is not None
    assert one.entropy_nats is not None
    return [one.id, one.logprobs.tolist(), one.top1_ids.tolist(), one.entropy_nats.tolist()]


def _from_json(values: list[Any]) -> ScoredSequence:
    name, *columns = values
    return ScoredSequence(name, *(np.array(column) for column in columns))
