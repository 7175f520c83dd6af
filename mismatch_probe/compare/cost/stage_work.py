"""What each stage of a comparison has to compute, on one process or over ranks."""

from dataclasses import dataclass
from math import ceil
from typing import Final, Literal

import numpy as np

from mismatch_probe.compare.cost.architecture import Architecture, Lengths, Workload
from mismatch_probe.compare.cost.rates import (
    NUMBER_OPERATIONS,
    PASS_OPERATIONS,
    Process,
    Work,
    decoding,
    scored_by_engine,
    whole_passes,
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
    ReplayStage,
    RoutingStage,
    SampleStage,
    ScoreStage,
    Stage,
)
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype

_LAYERS_GATHERED: Final = 2
"""FSDP2 gathers the next layer while one computes."""
_SUMS_OF_A_LAYER: Final = 2
"""Behind attention and behind the MLP."""


def rank_weight_bytes(architecture: Architecture, itemsize: int, *, ranks: int, tensor_parallel: int) -> float:
    """Bytes at most: a rank's part of every weight; under FSDP2 also two layers and what no layer holds, of which the
    head stays gathered. Ranks that divide products gather only each its own part of those.
    """
    part = architecture.parameters / ranks
    if ranks > tensor_parallel:
        gathered = architecture.outside_parameters + _LAYERS_GATHERED * architecture.layer_parameters
        part += gathered / tensor_parallel
    return part * itemsize


def work_of_rank(work: Work, passes: float, *, ranks: int, tensor_parallel: int) -> Work:
    """What a rank that has a device of its own does of a stage's passes: they are dealt out, whole, to groups of ranks
    that divide products. Where there are fewer passes than groups, some compute nothing of their own.
    """
    groups = ranks // tensor_parallel
    rounds = ceil(passes / groups)
    return work.times(min(1.0, rounds / passes)).per_rank(tensor_parallel) if passes else work


def received_bytes(
    architecture: Architecture, itemsize: int, passes: float, tokens: float, *, ranks: int, tensor_parallel: int
) -> float:
    """What each rank is sent by the others: under FSDP2 all that its group lacks of the weights, for every pass; where
    ranks divide products, twice a layer the others' sums for its tokens, in a ring.
    """
    groups = ranks // tensor_parallel
    weights = architecture.parameters / tensor_parallel * (1 - 1 / groups) * ceil(passes / groups)
    in_ring = 2 * (tensor_parallel - 1) / tensor_parallel
    sums = _SUMS_OF_A_LAYER * architecture.num_layers * architecture.hidden_size * tokens / groups * in_ring
    return (weights + sums) * itemsize


Kind = Literal[
    "sample", "replay", "engine-floor", "decode-alone", "engine-routing", "distributions", "score", "floor", "routing",
    "full-vocabulary",
]  # fmt: skip

_KINDS: Final[dict[type[Stage], Kind]] = {
    SampleStage: "sample",
    ReplayStage: "replay",
    EngineFloorStage: "engine-floor",
    DecodeAloneStage: "decode-alone",
    EngineRoutingStage: "engine-routing",
    DistributionsStage: "distributions",
    ScoreStage: "score",
    FloorStage: "floor",
    RoutingStage: "routing",
    FullVocabularyStage: "full-vocabulary",
}
_ENGINE_SEQUENCES: Final = 256
"""vLLM's default of `max_num_seqs`."""
_READS_OF_WEIGHTS: Final = 3
"""Times that the weights are read or written while they are loaded."""
_TRIES: Final = 3
_SCORE_MOVES: Final = 6
"""Times that an attention score is written or read where it is written out: product, mask, softmax, product."""


@dataclass(frozen=True)
class What:
    """What decides how fast a stage is. manner: the engine's arguments, or how the training path computes."""

    kind: Kind
    process: Process
    dtype: Dtype
    manner: str


def what_of(stage: Stage) -> What:
    side, kind = stage.side, _KINDS[type(stage)]
    settings = side.engine.args if side.engine is not None else side.training
    if isinstance(settings, TrainingPathSettings):
        settings = {"role": side.role, **settings.model_dump(mode="json", exclude={"batch_tokens"})}
    return What(kind, _process(side), side.dtype, repr(settings))


def _process(side: Side) -> Process:
    if side.engine is None:
        return "training"
    return "server" if side.engine.is_remote else "engine"


def loads_model(stage: Stage) -> bool:
    """Whether a model or an engine is loaded before it: not where a stage goes on with that of the one before."""
    if isinstance(stage, FloorStage):
        return stage.attention is not None
    return isinstance(stage, SampleStage | ScoreStage)


def loading_work(stage: Stage, workload: Workload) -> Work:
    """What loading its model moves: the checkpoint is read once, whatever the number of ranks. A reference that holds
    one layer at a time reads it for each try: of its attention, of its head, and of the formats that it computes in.
    """
    weight_bytes = workload.architecture_of(stage.side).parameters * stage.side.dtype.num_bytes
    readings = _TRIES if stage.name in workload.by_layer else 1
    return Work(
        memory_bytes=_READS_OF_WEIGHTS * weight_bytes * readings, disk_bytes=readings * stored_bytes(stage, workload)
    )


def engine_number(side: Side, name: str, otherwise: int) -> int:
    """A number among an engine's arguments."""
    assert side.engine is not None
    return int(side.engine.args.get(name) or otherwise)


def computes(stage: Stage, workload: Workload) -> bool:
    """Not where its weights are to be rounded to the format that they are stored in: that is the reference again."""
    return stage.side.rounded_to is None or stage.side.rounded_to != workload.checkpoint_dtype


def work_of(stage: Stage, workload: Workload) -> Work:
    """What a stage computes, by arithmetic from sizes alone; of an engine over several ranks, what each does."""
    architecture = workload.architecture_of(stage.side)
    match stage:
        case SampleStage():
            work = _sampling(stage.side, workload, architecture)
        case ReplayStage():
            steps = workload.lengths.sum() / workload.pass_tokens
            work = scored_by_engine(architecture, workload.lengths, steps).times(workload.samples)
        case EngineFloorStage():
            chosen = _repeated(workload, workload.settings.floors.num_sequences)
            work = scored_by_engine(architecture, chosen, len(chosen))
        case DecodeAloneStage():
            work = _decoded_alone(stage.side, workload, architecture)
        case EngineRoutingStage():
            chosen = _repeated(workload, workload.settings.experts.num_sequences or 0)
            work = scored_by_engine(architecture, chosen, len(chosen))
        case DistributionsStage():
            work = _distributions(workload, architecture)
        case ScoreStage():
            if not computes(stage, workload):
                return Work()
            times = workload.samples * len(stage.samplers)
            passes = workload.lengths.sum() / workload.pass_tokens
            work = whole_passes(architecture, workload.lengths, passes).times(times)
            work += _layer_by_layer(stage, workload, architecture, passes * times)
            return _of_rank(stage, workload, work)
        case FloorStage():
            return _of_rank(stage, workload, _floor(stage, workload, architecture))
        case RoutingStage():
            chosen = _repeated(workload, workload.settings.experts.num_sequences or 0)
            return whole_passes(architecture, chosen, len(chosen)).times(len(stage.samplers))
        case FullVocabularyStage():
            number = min(_positions(workload, architecture), workload.sequences)
            return whole_passes(architecture, np.resize(workload.lengths, number), number)
    return work.per_rank(engine_number(stage.side, "tensor_parallel_size", 1))


def _dealt_out(stage: ScoreStage | FloorStage, workload: Workload) -> tuple[float, float]:
    """The passes that ranks deal out, where each batch is one, and their tokens."""
    if isinstance(stage, FloorStage):
        chosen = _repeated(workload, workload.settings.floors.num_sequences)
        return float(len(chosen) * len(stage.samplers)), float(chosen.sum()) * len(stage.samplers)
    tokens = float(workload.lengths.sum()) * workload.samples * len(stage.samplers)
    return tokens / workload.pass_tokens, tokens


def _of_rank(stage: ScoreStage | FloorStage, workload: Workload, work: Work) -> Work:
    """What one process does of it: of ranks with devices of their own, what each does."""
    training, ranks = stage.side.training, stage.side.num_ranks
    if training is None or ranks < 2 or workload.ranks_share_cores:
        return work
    passes, _ = _dealt_out(stage, workload)
    return work_of_rank(work, passes, ranks=ranks, tensor_parallel=training.tensor_parallel)


def received_by_rank(stage: ScoreStage | FloorStage, workload: Workload) -> float:
    """Bytes that each rank of the stage is sent by the others."""
    training = stage.side.training
    assert training is not None
    return received_bytes(
        workload.architecture_of(stage.side),
        stage.side.dtype.num_bytes,
        *_dealt_out(stage, workload),
        ranks=stage.side.num_ranks,
        tensor_parallel=training.tensor_parallel,
    )


def _layer_by_layer(stage: ScoreStage, workload: Workload, architecture: Architecture, passes: float) -> Work:
    """What holding one layer at a time takes besides: the checkpoint is read, and each pass goes through the model's
    own forward once a layer. Hidden states on disk are written and read once a layer.
    """
    if stage.name not in workload.by_layer:
        return Work()
    hidden_states = 2 * architecture.num_layers * hidden_bytes(stage, workload) if workload.hidden_on_disk else 0.0
    return Work(
        operations=passes * architecture.num_layers * (PASS_OPERATIONS + architecture.num_layers),
        disk_bytes=stored_bytes(stage, workload) + hidden_states,
    )


def stored_bytes(stage: Stage, workload: Workload) -> float:
    """Of the checkpoint's files; where their dtype is not known, as if it were the stage's own."""
    dtype = workload.checkpoint_dtype or stage.side.dtype
    return float(workload.architecture_of(stage.side).parameters * dtype.num_bytes)


def hidden_bytes(stage: ScoreStage, workload: Workload) -> float:
    """Of all responses of a stage between two layers."""
    tokens = float(workload.lengths.sum()) * workload.samples * len(stage.samplers)
    return tokens * workload.architecture_of(stage.side).hidden_size * stage.side.dtype.num_bytes


def _sampling(mu: Side, workload: Workload, architecture: Architecture) -> Work:
    """Every response, as many at a time as the engine takes."""
    responses, sequences = workload.responses, workload.sequences
    batch = workload.settings.engine.batch_sequences or _ENGINE_SEQUENCES
    at_once = min(batch, engine_number(mu, "max_num_seqs", _ENGINE_SEQUENCES))
    steps = ceil(sequences / at_once) * responses.longest_tokens
    prompts = np.tile(workload.prompts, workload.samples)
    return decoding(mu.dtype, architecture, prompts, responses.mean_tokens, steps)


def _decoded_alone(mu: Side, workload: Workload, architecture: Architecture) -> Work:
    """The first tokens of a few responses, one response at a time."""
    repeated = _repeated(workload, workload.settings.floors.num_sequences)
    each = min(workload.responses.mean_tokens, DECODED_ALONE)
    return decoding(mu.dtype, architecture, repeated - workload.responses.mean_tokens, each, len(repeated) * each)


def _distributions(workload: Workload, architecture: Architecture) -> Work:
    """A prefill of its own for each position, and Python numbers for its whole vocabulary."""
    positions = _positions(workload, architecture)
    contexts = np.resize(workload.lengths - workload.responses.mean_tokens / 2, positions)
    handed_over = Work(operations=positions * architecture.vocab_size * NUMBER_OPERATIONS)
    steps = contexts.sum() / workload.pass_tokens
    return scored_by_engine(architecture, contexts, steps) + handed_over


def _positions(workload: Workload, architecture: Architecture) -> int:
    """Positions whose whole distributions are compared, about as `compare.stages` will choose them."""
    responses, tokens = workload.responses, float(workload.lengths.sum()) * workload.samples
    most = min(workload.settings.full_vocabulary.positions, MOST_NUMBERS // architecture.vocab_size)
    most = min(most, int(workload.sequences * responses.mean_tokens))
    context = tokens / workload.sequences - responses.mean_tokens / 2
    return int(min(most, max(LEAST_CONTEXT_TOKENS, tokens) / context))


def _repeated(workload: Workload, most: int) -> Lengths:
    """Of the few responses of a sampler that are scored once more."""
    short = workload.lengths[workload.lengths <= LONGEST_REPEATED]
    return np.resize(short, min(len(short) * workload.samples, most))


def _floor(stage: FloorStage, workload: Workload, architecture: Architecture) -> Work:
    chosen = np.tile(_repeated(workload, workload.settings.floors.num_sequences), len(stage.samplers))
    work = whole_passes(architecture, chosen, len(chosen))
    if stage.attention != "eager":
        return work
    scores = float((chosen**2).sum()) * architecture.num_layers * architecture.num_heads
    return Work(
        work.matrix_flops,
        architecture.attention_flops(chosen, causal=False),
        work.memory_bytes + scores * stage.side.dtype.num_bytes * _SCORE_MOVES,
        work.operations,
    )
