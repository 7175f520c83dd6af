"""What a comparison is: which sides are compared, on which responses, and how they are computed."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from mismatch_probe.config.model import (
    EngineSettings,
    ExpertSettings,
    FloorSettings,
    FullVocabularySettings,
    ListAsTuple,
    ModelSettings,
    PromptSettings,
    ReferenceSettings,
    SamplingSettings,
    Settings,
    TrainingPathSettings,
)
from mismatch_probe.config.sides import DeclaredSide, InferSide, Side, SideName, TrainSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.stats.results import LEVEL

FP32: Final = Dtype.FP32
Declared = TypeVar("Declared", InferSide, TrainSide)
PairName = tuple[str, str]
"""The names of a training side and of an engine's side."""


def _written_as_pairs(value: object) -> object:
    if isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return value
    raise ValueError('write a pair as [training side, inference side], for instance pairs = [["bf16", "bf16"]]')


PairField = Annotated[tuple[SideName, SideName], ListAsTuple]
PairsField = Annotated[tuple[PairField, ...], ListAsTuple, BeforeValidator(_written_as_pairs)]


class CompareSettings(Settings):
    """One run of `compare`.

    infer, train: without those that are nothing but a dtype, which are the same whether they are given or only named in
    a pair.
    """

    model: ModelSettings
    infer: Annotated[tuple[InferSide, ...], ListAsTuple] = ()
    train: Annotated[tuple[TrainSide, ...], ListAsTuple] = ()
    pairs: PairsField = tuple((dtype.value, dtype.value) for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32))
    """Names of a training side and of an engine's side; a dtype's name is a side without further settings. Where sides
    are given and no pairs, each of `train` is paired with each of `infer`.
    """
    prompts: PromptSettings = PromptSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    training: TrainingPathSettings = TrainingPathSettings()
    reference: ReferenceSettings = ReferenceSettings()
    floors: FloorSettings = FloorSettings()
    experts: ExpertSettings = ExpertSettings()
    full_vocabulary: FullVocabularySettings = FullVocabularySettings()
    confidence: float = Field(default=LEVEL, gt=0.5, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _each_against_each(cls, values: Any) -> Any:
        if isinstance(values, dict) and "pairs" not in values and (values.get("infer") or values.get("train")):
            infer, train = (_names(values.get(kind) or ()) for kind in ("infer", "train"))
            if None in (infer, train):
                return values
            if not (infer and train):
                raise ValueError("--train and --infer go together; give both, or a file with pairs")
            return values | {"pairs": [(training, other) for training in train for other in infer]}
        return values

    @model_validator(mode="after")
    def _sides_fit_the_pairs(self) -> "CompareSettings":
        if not self.pairs:
            raise ValueError("no dtype to compare; give --dtype, or --train-dtype with --infer-dtype")
        if len(set(self.pairs)) != len(self.pairs):
            raise ValueError("the same pair of sides is asked for twice")
        for kind, sides, names in (
            ("train", self.train, {train for train, _ in self.pairs}),
            ("infer", self.infer, {infer for _, infer in self.pairs}),
        ):
            _require_declared(kind, sides, names)
        for side in self.train:
            side.merge_into(self.training)
        if self.engine.is_remote:
            raise ValueError(
                "a server is a side of its own, not the run's engine; write --infer NAME:url=http://HOST:PORT"
            )
        for kind in ("train", "infer"):
            object.__setattr__(self, kind, tuple(side for side in getattr(self, kind) if side.name not in tuple(Dtype)))
        return self

    @property
    def infer_sides(self) -> tuple[Side, ...]:
        """The engines' sides, in the order of the pairs."""
        return tuple(self.mu(name) for name in dict.fromkeys(infer for _, infer in self.pairs))

    @property
    def train_sides(self) -> tuple[Side, ...]:
        """The sides of the training path, in the order of the pairs."""
        return tuple(self.pi(name) for name in dict.fromkeys(train for train, _ in self.pairs))

    def mu(self, name: str) -> Side:
        """The engine's side of that name."""
        declared_side = next((side for side in self.infer if side.name == name), None)
        side = declared_side or InferSide(name=name, dtype=Dtype.parse(name))
        return Side(name, "mu", side.dtype, self._model(side), engine=side.merge_into(self.engine), logged=side.logged)

    def pi(self, name: str) -> Side:
        """The training path's side of that name."""
        declared_side = next((side for side in self.train if side.name == name), None)
        side = declared_side or TrainSide(name=name, dtype=Dtype.parse(name))
        return Side(
            name, "pi", side.dtype, self._model(side), training=side.merge_into(self.training), logged=side.logged
        )

    def reference_of(self, pi: Side, rounded_to: Dtype | None = None) -> Side | None:
        """The reference for a side of the training path: its weights, as given or rounded; None where the run has none.

        Sides with the same weights share one. That of weights other than the run's is called by the first of them.
        """
        dtype = self.reference.dtype
        return None if dtype == "none" else self.reference_in(dtype, pi, rounded_to)

    def reference_in(self, dtype: Dtype, pi: Side, rounded_to: Dtype | None = None) -> Side:
        """The reference for a side of the training path as a run with a reference in `dtype` has it."""
        first = next(side for side in (*self.train_sides, pi) if side.has_weights_of(pi))
        assert first.training is not None
        adapter = first.training.model_dump(include={"adapter", "adapter_merged"})
        ranks = max((side.num_ranks for side in self.train_sides if side.has_weights_of(pi)), default=0)
        ranks = 0 if self.reference.by_layer else ranks
        training = self.training.model_copy(update={**adapter, "ranks": ranks or None, "tensor_parallel": 1})
        name: str = dtype
        if (pi.model, pi.adapter) != (self.model, self.training.adapter):
            name += f"-of-{first.name}"
        if rounded_to is not None:
            name += f"-weights-{rounded_to}"
        return Side(name, "ref", dtype, pi.model, training=training, rounded_to=rounded_to)

    def for_pairs(self, pairs: Sequence[PairName]) -> "CompareSettings":
        """These settings for other pairs, with the sides that those name and these declare."""
        train, infer = ({pair[place] for pair in pairs} for place in range(2))
        return self.model_copy(
            update={
                "pairs": tuple(pairs),
                "infer": tuple(side for side in self.infer if side.name in infer),
                "train": tuple(side for side in self.train if side.name in train),
            }
        )

    def without_samplers(self, names: Collection[str]) -> "CompareSettings | None":
        """These settings without the pairs of such sides of the engine; None where no pair remains."""
        pairs = [pair for pair in self.pairs if pair[1] not in names]
        return self.for_pairs(pairs) if pairs else None

    def with_more(
        self, pairs: Sequence[PairName], infer: Sequence[InferSide], train: Sequence[TrainSide]
    ) -> "CompareSettings":
        """These settings with more pairs and sides; those that are there stay as they are."""
        names = {side.name for side in self.infer}, {side.name for side in self.train}
        return self.model_copy(
            update={
                "pairs": tuple(dict.fromkeys((*self.pairs, *pairs))),
                "infer": (*self.infer, *(side for side in infer if side.name not in names[0])),
                "train": (*self.train, *(side for side in train if side.name not in names[1])),
            }
        )

    def exact_counterpart(self, pair: PairName) -> PairName | None:
        """The pair that differs from this one in its dtypes alone, FP32 or better on both sides; None where none was
        asked for. What a log's side computed with is not known, so that none differs from it in its dtype alone.
        """
        pi, mu = self.pi(pair[0]), self.mu(pair[1])
        if pi.logged or mu.logged:
            return None
        for train, infer in self.pairs:
            exact_pi, exact_mu = self.pi(train), self.mu(infer)
            is_exact = exact_pi.dtype.can_be_reference and exact_mu.dtype.can_be_reference
            if is_exact and not (exact_pi.differs_from(pi) or exact_mu.differs_from(mu)):
                return train, infer
        return None

    def has_plain_weights(self, pair: PairName) -> bool:
        """Whether both sides compute here, with the run's own checkpoint and no adapter."""
        sides = self.pi(pair[0]), self.mu(pair[1])
        return all(side.is_computed_here and side.model == self.model and side.adapter is None for side in sides)

    def exact_sides(self, pair: PairName) -> tuple[list[DeclaredSide], list[DeclaredSide]]:
        """The sides of a pair as they would be declared in FP32, under names of their own. A server serves one dtype,
        so the engine in this process serves the same checkpoint in FP32 and in the server's dtype.
        """
        train = next((side for side in self.train if side.name == pair[0]), None)
        infer = next((side for side in self.infer if side.name == pair[1]), None)
        exact_train = _in_fp32(train) or TrainSide(name=FP32, dtype=FP32)
        if infer is None or infer.url is None:
            return [exact_train], [_in_fp32(infer) or InferSide(name=FP32, dtype=FP32)]
        own = train or TrainSide(name=pair[0], dtype=Dtype.parse(pair[0]))
        prefix = f"{infer.name}-" if infer.checkpoint or infer.adapter else ""
        return [own, exact_train], [
            InferSide(name=f"{prefix}{dtype}", dtype=dtype, checkpoint=infer.checkpoint, adapter=infer.adapter)
            for dtype in (infer.dtype, FP32)
        ]

    def _model(self, side: DeclaredSide) -> ModelSettings:
        if side.checkpoint in (None, self.model.path):
            return self.model
        assert side.checkpoint is not None
        return ModelSettings(path=side.checkpoint, trust_remote_code=self.model.trust_remote_code)


def _in_fp32(side: Declared | None) -> Declared | None:
    return None if side is None else side.model_copy(update={"name": f"{side.name}-{FP32}", "dtype": FP32})


def _names(sides: Any) -> list[Any] | None:
    """The names of sides that are not validated yet, None where they are no list."""
    if not isinstance(sides, list | tuple):
        return None
    names = [side.get("name") if isinstance(side, dict) else getattr(side, "name", None) for side in sides]
    return [name for name in names if name is not None]


def _require_declared(kind: str, sides: tuple[DeclaredSide, ...], names_in_pairs: set[str]) -> None:
    """Each name of a pair is a declared side or a dtype, and each declared side is in a pair.

    Raises:
        ValueError: one is not.
    """
    names = [side.name for side in sides]
    for side in sides:
        if names.count(side.name) > 1:
            raise ValueError(f"--{kind} {side.name} is given twice; give each side a name of its own")
        if side.name not in names_in_pairs:
            raise ValueError(f"--{kind} {side.name} is in no pair; name it in pairs, or leave it out")
        if side.name in tuple(Dtype) and side != type(side)(name=side.name, dtype=Dtype.parse(side.name)):
            raise ValueError(f"--{kind} {side.name} has settings of its own; give it another name than a dtype's")
    for name in names_in_pairs.difference(names):
        try:
            Dtype.parse(name)
        except UsageError as error:
            raise ValueError(f"{error}; or say what side it is: --{kind} {name}:dtype=bf16,...") from error
