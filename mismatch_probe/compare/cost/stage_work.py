"""The sizes of a comparison, and what each of its stages computes on one process or over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, TypeGuard

import numpy as np

from mismatch_probe.compare.cost.roofline import (
    NUMBER_OPERATIONS,
    PASS_OPERATIONS,
    Architecture,
    Lengths,
    ProcessName,
    Work,
    decoding,
    passes_over,
)
from mismatch_probe.compare.stages import (
    DECODED_ALONE,
    LEAST_CONTEXT_TOKENS,
    LONGEST_REPEATED,
    MOST_NUMBERS,
    DecodeAloneStage,
    DistributionsStage,
    EngineFloorStage,
    EngineRoutingStage,
    FloorStage,
    FullVocabularyStage,
    RoutingStage,
    SampleStage,
    ScoreStage,
    Stage,
)
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype, short_name
from mismatch_probe.records.manifest import Manifest

_ENGINE_SEQUENCES: Final = 256
"""vLLM's default of `max_num_seqs`."""
_READS_OF_WEIGHTS: Final = 3
"""Times that the weights are read or written while they are loaded."""
_TRIES: Final = 3
"""Readings of a checkpoint that is held layer by layer: of its attention, of its head, and of its formats."""
_LAYERS_GATHERED: Final = 2
"""FSDP2 gathers the next layer while one computes."""
_SUMS_OF_A_LAYER: Final = 2
"""After attention and after the MLP."""


@dataclass(frozen=True)
class ResponseLengths:
    """Tokens of a response."""

    mean_tokens: float
    longest_tokens: int
    source: str
    """The earlier run that shows it, or `max_new_tokens`."""

    def limited_to(self, most: int) -> "ResponseLengths":
        return ResponseLengths(min(self.mean_tokens, most), min(self.longest_tokens, most), self.source)


@dataclass(frozen=True)
class Workload:
    """A comparison by its sizes."""

    architectures: Mapping[str, Architecture]
    """Of each checkpoint, by the path that sides name."""
    settings: CompareSettings
    prompt_tokens: Sequence[int]
    """Of each prompt."""
    responses: ResponseLengths
    checkpoint_dtype: Dtype | None = None
    """In which the run's own weights are stored."""
    by_layer: frozenset[str] = frozenset()
    """The stages that hold one layer at a time."""
    hidden_on_disk: bool = False
    """Whether hidden states between two layers are too many for memory there."""
    ranks_share_cores: bool = True
    """Whether the ranks of a model share one processor, so that they take as long as one process would."""

    @property
    def pass_tokens(self) -> int:
        """Tokens of a forward pass over whole sequences."""
        return self.settings.training.batch_tokens

    @property
    def samples(self) -> int:
        """Responses of an engine to each prompt."""
        return self.settings.sampling.samples_per_prompt

    @property
    def sequences(self) -> int:
        """Responses of one engine."""
        return len(self.prompt_tokens) * self.samples

    @property
    def prompts(self) -> Lengths:
        """Tokens of each prompt."""
        return np.asarray(self.prompt_tokens, dtype=np.float64)

    @property
    def lengths(self) -> Lengths:
        """Tokens of a sequence of each prompt, with its response."""
        return self.prompts + self.responses.mean_tokens

    def architecture_of(self, side: Side) -> Architecture:
        return self.architectures[side.model.path]


def workload_of(
    manifest: Manifest,
    architectures: Mapping[str, Architecture],
    prompt_tokens: Sequence[int],
    responses: ResponseLengths,
) -> Workload:
    """The sizes of a run; its responses are at most as long as its settings allow."""
    checkpoint_dtype = manifest.model.checkpoint_dtype
    return Workload(
        architectures,
        manifest.settings,
        prompt_tokens,
        responses.limited_to(manifest.settings.sampling.max_new_tokens),
        next((dtype for dtype in Dtype if dtype == short_name(checkpoint_dtype)), None),
        ranks_share_cores=not manifest.hardware.get("gpus") or manifest.settings.training.device == "cpu",
    )


@dataclass(frozen=True)
class StageKey:
    """What decides how fast a stage is."""

    kind: type[Stage]
    process: ProcessName
    dtype: Dtype
    manner: str
    """The engine's arguments, or how the training path computes."""


def key_of(stage: Stage) -> StageKey:
    side = stage.side
    settings = side.engine.args if side.engine is not None else side.training
    if isinstance(settings, TrainingPathSettings):
        settings = {"role": side.role, **settings.model_dump(mode="json", exclude={"batch_tokens"})}
    return StageKey(type(stage), _process(side), side.dtype, repr(settings))


def _process(side: Side) -> ProcessName:
    if side.engine is None:
        return "training"
    return "server" if side.engine.is_remote else "engine"


def kinds_of(stages: Sequence[Stage]) -> list[tuple[ProcessName, Dtype]]:
    """The processes and dtypes that stages run in, for their rates to be measured; nothing here tells of a server's."""
    kinds = dict.fromkeys((_process(stage.side), stage.side.dtype) for stage in stages)
    return [(process, dtype) for process, dtype in kinds if process != "server"]


def engine_number(side: Side, name: str, otherwise: int) -> int:
    """A number among an engine's arguments."""
    assert side.engine is not None
    return int(side.engine.args.get(name) or otherwise)


def computes(stage: Stage, workload: Workload) -> bool:
    """Not where its weights are to be rounded to the format that they are stored in: that is the reference again."""
    return stage.side.rounded_to is None or stage.side.rounded_to != workload.checkpoint_dtype


def work_of(stage: Stage, workload: Workload) -> Work:
    """What a stage computes, from sizes alone; of several ranks with devices of their own, what each does."""
    if not computes(stage, workload):
        return Work()
    architecture, side = workload.architecture_of(stage.side), stage.side
    if isinstance(stage, SampleStage):
        at_once = engine_number(side, "max_num_seqs", _ENGINE_SEQUENCES)
        at_once = min(at_once, workload.settings.engine.batch_sequences or _ENGINE_SEQUENCES)
        steps = ceil(workload.sequences / at_once) * workload.responses.longest_tokens
        prompts = np.tile(workload.prompts, workload.samples)
        work = decoding(side.dtype, architecture, prompts, workload.responses.mean_tokens, steps)
    elif isinstance(stage, DecodeAloneStage):
        prompts = _few(workload, workload.settings.floors.num_sequences) - workload.responses.mean_tokens
        each = min(workload.responses.mean_tokens, DECODED_ALONE)
        work = decoding(side.dtype, architecture, prompts, each, len(prompts) * each)
    else:
        lengths, passes = _passes(stage, workload)
        work = passes_over(_process(side), architecture, lengths, passes)
        if isinstance(stage, DistributionsStage):
            work += Work(operations=len(lengths) * architecture.vocab_size * NUMBER_OPERATIONS)
        if stage.name in workload.by_layer:
            work += _layer_by_layer(stage, workload, passes)
        if is_dealt_out(stage) and not workload.ranks_share_cores:
            return _of_rank(side, work, passes)
    return work if side.engine is None else work.per_rank(engine_number(side, "tensor_parallel_size", 1))


def _passes(stage: Stage, workload: Workload) -> tuple[Lengths, float]:
    """The sequences that a stage computes whole, by their tokens, and in how many passes."""
    settings = workload.settings
    samplers = len(stage.samplers) if isinstance(stage, ScoreStage | FloorStage | RoutingStage) else 1
    match stage:
        case EngineFloorStage() | FloorStage():
            lengths = np.tile(_few(workload, settings.floors.num_sequences), samplers)
        case EngineRoutingStage() | RoutingStage():
            lengths = np.tile(_few(workload, settings.experts.num_sequences or 0), samplers)
        case FullVocabularyStage():
            lengths = np.resize(workload.lengths, min(_positions(stage.side, workload), workload.sequences))
        case DistributionsStage():
            contexts = workload.lengths - workload.responses.mean_tokens / 2
            lengths = np.resize(contexts, _positions(stage.side, workload))
            return lengths, _num_batches(lengths, workload)
        case _:
            lengths = np.tile(workload.lengths, workload.samples * samplers)
            return lengths, _num_batches(lengths, workload)
    return lengths, len(lengths)


def _num_batches(lengths: Lengths, workload: Workload) -> float:
    """Passes that sequences are packed into, at least one."""
    return max(1.0, float(lengths.sum()) / workload.pass_tokens)


def _few(workload: Workload, most: int) -> Lengths:
    """Of the few responses of a sampler that are scored once more."""
    short = workload.lengths[workload.lengths <= LONGEST_REPEATED]
    return np.resize(short, min(len(short) * workload.samples, most))


def _positions(side: Side, workload: Workload) -> int:
    """Positions whose whole distributions are compared, about as `compare.stages` will choose them."""
    responses, tokens = workload.responses, float(workload.lengths.sum()) * workload.samples
    most = min(workload.settings.full_vocabulary.positions, MOST_NUMBERS // workload.architecture_of(side).vocab_size)
    most = min(most, int(workload.sequences * responses.mean_tokens))
    context = tokens / workload.sequences - responses.mean_tokens / 2
    return int(min(most, max(LEAST_CONTEXT_TOKENS, tokens) / context))


def loads_model(stage: Stage) -> bool:
    """Whether a model or an engine is loaded before it: not where a stage continues with that of the one before."""
    if isinstance(stage, FloorStage):
        return stage.attention is not None
    return isinstance(stage, SampleStage | ScoreStage)


def loading_work(stage: Stage, workload: Workload) -> Work:
    """What loading its model moves: the checkpoint is read once, whatever the number of ranks, and several times where
    one layer is held at a time.
    """
    weight_bytes = workload.architecture_of(stage.side).parameters * stage.side.dtype.num_bytes
    readings = _TRIES if stage.name in workload.by_layer else 1
    return Work(
        memory_bytes=_READS_OF_WEIGHTS * weight_bytes * readings, disk_bytes=readings * _stored_bytes(stage, workload)
    )


def _stored_bytes(stage: Stage, workload: Workload) -> float:
    """Of the checkpoint's files; where their dtype is not known, as if it were the stage's own."""
    dtype = workload.checkpoint_dtype or stage.side.dtype
    return float(workload.architecture_of(stage.side).parameters * dtype.num_bytes)


def hidden_bytes(stage: Stage, workload: Workload) -> float:
    """Of all responses of a stage between two layers."""
    tokens = float(_passes(stage, workload)[0].sum())
    return tokens * workload.architecture_of(stage.side).hidden_size * stage.side.dtype.num_bytes


def _layer_by_layer(stage: Stage, workload: Workload, passes: float) -> Work:
    """The extra work of holding one layer at a time: the checkpoint is read, and each pass goes through the model's
    own forward once a layer. Hidden states on disk are written and read once a layer.
    """
    layers = workload.architecture_of(stage.side).num_layers
    hidden_states = 2 * layers * hidden_bytes(stage, workload) if workload.hidden_on_disk else 0.0
    return Work(
        operations=passes * layers * (PASS_OPERATIONS + layers),
        disk_bytes=_stored_bytes(stage, workload) + hidden_states,
    )


def is_dealt_out(stage: Stage) -> TypeGuard[ScoreStage | FloorStage]:
    """Whether ranks share its passes."""
    return isinstance(stage, ScoreStage | FloorStage) and stage.side.num_ranks > 1


def _of_rank(side: Side, work: Work, passes: float) -> Work:
    """Whole passes go to groups of ranks that divide products; with fewer passes than groups, some groups are idle."""
    assert side.training is not None
    groups = side.num_ranks // side.training.tensor_parallel
    share = min(1.0, ceil(passes / groups) / passes) if passes else 1.0
    return work.times(share).per_rank(side.training.tensor_parallel)


def received_by_rank(stage: ScoreStage | FloorStage, workload: Workload) -> float:
    """Bytes that the others send to each rank of the stage: under FSDP2 all that its group lacks of the weights, for
    every pass; where ranks divide products, twice a layer the others' sums for its tokens, in a ring.
    """
    training, architecture = stage.side.training, workload.architecture_of(stage.side)
    assert training is not None
    degree, (lengths, passes) = training.tensor_parallel, _passes(stage, workload)
    groups = stage.side.num_ranks // degree
    weights = architecture.parameters / degree * (1 - 1 / groups) * ceil(passes / groups)
    in_ring = 2 * (degree - 1) / degree
    tokens = float(lengths.sum()) / groups
    sums = _SUMS_OF_A_LAYER * architecture.num_layers * architecture.hidden_size * tokens * in_ring
    return (weights + sums) * stage.side.dtype.num_bytes


def rank_weight_bytes(architecture: Architecture, itemsize: int, *, ranks: int, tensor_parallel: int) -> float:
    """Bytes at most: a rank's part of every weight; under FSDP2 also two layers and what no layer holds, of which the
    head stays gathered. Ranks that divide products gather only each its own part of those.
    """
    part = architecture.parameters / ranks
    if ranks > tensor_parallel:
        num_gathered = architecture.outside_parameters + _LAYERS_GATHERED * architecture.layer_parameters
        part += num_gathered / tensor_parallel
    return part * itemsize
