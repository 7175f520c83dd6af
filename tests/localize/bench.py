"""Both sides from the training path: recorded on the same ids, then held against the reference. No engine is needed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import ModelSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.localize.run import place_errors
from mismatch_probe.localize.suspects import PlaceNames, find_suspects
from mismatch_probe.records.activations import ActivationStore, PlaceSums, RouterSums, plan_activation_batches
from mismatch_probe.records.findings import PlaceError, Suspect
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.sequences import Sequences
from mismatch_probe.training_path.inside.recording import record_activations
from mismatch_probe.training_path.inside.reference_walk import ReferenceWalk
from mismatch_probe.training_path.precision import load_reference_model, load_training_model

CPU = torch.device("cpu")


def some_sequences(count: int = 10, *, vocab_size: int = 256) -> list[TokenSequence]:
    """Responses of 40 to 60 tokens, longer than the tiny models' sliding window."""
    random = np.random.default_rng(0)
    return [
        TokenSequence(
            f"s{index}",
            random.integers(3, vocab_size, 3 + index).tolist(),
            random.integers(3, vocab_size, 40 + index).tolist(),
        )
        for index in range(count)
    ]


@dataclass(frozen=True)
class Held:
    """Two recorded sides held against the reference."""

    places: list[PlaceSums]
    routers: list[RouterSums]
    errors: list[PlaceError]
    suspects: list[Suspect]

    def error(self, layer: int | None, place: str) -> PlaceError:
        return next(one for one in self.errors if (one.layer, one.place) == (layer, place))


class Bench:
    """One checkpoint, its training path loaded once."""

    def __init__(
        self, folder: Path, scratch: Path, dtype: Dtype = Dtype.BF16, *, modules: bool = True, batch_tokens: int = 800
    ) -> None:
        """All sequences are one batch unless `batch_tokens` is less."""
        self.folder = folder
        self.dtype = dtype
        self.modules = modules
        self.store = ActivationStore(scratch)
        self.batches = plan_activation_batches(some_sequences(), batch_tokens=batch_tokens, logit_rows=10_000)
        self.model, self.arithmetic = load_training_model(
            folder, dtype, TrainingPathSettings(), CPU, trust_remote_code=False
        )

    def record(self, side: str) -> list[ScoredSequence]:
        return record_activations(
            self.model, self.arithmetic, self.batches, self.store, modules=self.modules, side=side
        )

    def recorded(self, side: str) -> dict[str, bytes]:
        """The files of a side, by their place in its folder."""
        folder = self.store.file(side, 0, None).parents[1]
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def twice(self) -> Held:
        """The side recorded twice, held against itself."""
        self.record("once")
        self.record("again")
        return self.hold("once", "again")

    def hold(self, first: str, second: str) -> Held:
        model, arithmetic, _ = load_reference_model(
            self.folder, Dtype.FP32, TrainingPathSettings(), CPU, rounded_to=None, trust_remote_code=False
        )
        walk = ReferenceWalk(model, arithmetic, self.store, modules=self.modules, sides=(first, second))
        walk.run(self.batches)
        places = walk.places()
        paths = [f"model.layers.{number}" for number in range(model.config.num_hidden_layers)]
        names = PlaceNames(paths, paths, {})
        settings = LocalizeSettings(model=ModelSettings(path=""), train_dtype=self.dtype, infer_dtype=self.dtype)
        counts = [count for batch in self.batches for count in batch.rows_per_sequence]
        errors = place_errors(places, Estimator(Sequences.of_lengths(counts)), names, settings)
        return Held(places, walk.routers(), errors, find_suspects(places, errors, self.dtype, self.dtype))
