"""The preparation of a comparison: checkpoint, prompts and settings are resolved, checked and recorded."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mismatch_probe.compare.cost.roofline import Architectures
from mismatch_probe.compare.plan import make_plan, model_length
from mismatch_probe.compare.preflight import Inputs, check_sides, checked_inputs, with_typed_engines
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import EngineSettings, ExpertSettings, ModelSettings
from mismatch_probe.config.resuming import with_one_spelling
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import (
    ENGINES,
    Start,
    check_room,
    engine_provider,
    reach,
    rehearsal,
    require_images,
)
from mismatch_probe.errors import (
    INSTALL_ENGINES,
    INSTALL_SERVER,
    MismatchProbeError,
    MissingExtra,
    StartRefused,
    UsageError,
)
from mismatch_probe.provenance import checkpoint, environment
from mismatch_probe.provenance.checkpoint_differences import checkpoint_difference
from mismatch_probe.provenance.environment import content_key, decisive_keys, package_keys, recorded_environment
from mismatch_probe.provenance.stored_tensors import adapter_keys
from mismatch_probe.records.manifest import CheckpointDifference, Manifest, ModelIdentity, StageRecord
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks import Prompt, check_lengths, load_prompts, resolve_model
from mismatch_probe.verdict.preflight.facts import has_experts

_BATCH_SEQUENCES = 256


@dataclass(frozen=True)
class Preparation:
    """A comparison ready to start."""

    manifest: Manifest
    prompts: list[EncodedPrompt]
    architectures: Architectures | None = None
    """What each checkpoint's forward pass computes; None where it is not counted yet."""

    @property
    def parameters(self) -> int:
        """The number of weights, from the headers of the checkpoint's files."""
        return checkpoint.num_parameters(Path(self.manifest.model.folder))

    @property
    def longest_sequence(self) -> int:
        return model_length(self.prompts, self.manifest.settings, self.manifest.model.context_length)


def prepare(
    settings: CompareSettings, *, with_rehearsal: bool = False, responses_are_given: bool = False
) -> Preparation:
    """Resolve and check everything that can be checked without loading the model.

    With `with_rehearsal` the engine is also configured in a process of its own, for seconds. A run of one engine's
    side learns of a refusal when the engine starts; several sides are always rehearsed. A side that is refused is left
    out with its reason, where others remain. With `responses_are_given` the caller brings the responses and the
    numbers of logged sides.
    """
    _require_packages(settings)
    if not responses_are_given:
        _require_computed_sides(settings)
    settings = with_one_spelling(with_typed_engines(settings))
    check_sides(settings)
    for mu in settings.infer_sides:
        if mu.engine is not None and mu.engine.is_remote:
            reach(mu.engine)
    folder = resolve_model(settings.model)
    folders = {settings.model.path: folder, **_checkpoint_folders(settings)}
    config = checkpoint.read_config(folder)
    context_length = checkpoint.context_length(config)
    prompts = load_prompts(settings.prompts, seed=settings.sampling.seed, takes_images=True)
    settings = _with_images(settings, prompts)
    starts = [
        (str(folders[mu.model.path]), mu.dtype, mu.engine)
        for mu in settings.infer_sides
        if mu.engine is not None and mu.is_computed_here
    ]
    in_fp16 = _fp16_start(starts)
    engine_configured = rehearsal(
        [*starts, *in_fp16],
        settings.sampling,
        max_model_len=min(settings.sampling.max_new_tokens + 2, context_length or sys.maxsize),
        trust_remote_code=settings.model.trust_remote_code,
        num_images=max(len(prompt.images) for prompt in prompts),
    )
    adapters = adapter_keys(side.adapter for side in (*settings.infer_sides, *settings.train_sides))
    no_refusals: dict[int, MismatchProbeError] = {}
    is_rehearsed = len(starts) + len(in_fp16) > 1 or (with_rehearsal and starts)
    with engine_configured if is_rehearsed else nullcontext(no_refusals) as refusals:
        identities = {path: checkpoint.identity_of(path, place) for path, place in folders.items()}
        identity = identities.pop(settings.model.path)
        _require_same_vocabulary(identity, config, identities.values())
        checkpoint_differences = _checkpoint_differences(settings, folders)
        inputs = checked_inputs(settings, folders, prompts, checkpoint.vocab_size(config), context_length)
        _require_room_for_responses(settings, inputs.prompts, context_length)
    own_engines = [mu for mu in settings.infer_sides if mu.engine is not None and mu.is_computed_here]
    of_sides = {own_engines[number].name: error for number, error in refusals.items() if number < len(own_engines)}
    settings, refused_sides = without_refused(settings, of_sides)
    hardware = environment.hardware()
    recorded_settings = _resolved_settings(settings, inputs, config)
    packages = ENGINES.packages(mu.engine.name for mu in settings.infer_sides if mu.engine is not None)
    versions, variables = environment.versions() | packages, recorded_environment()
    manifest = Manifest(
        **environment.manifest_head(),
        settings=recorded_settings,
        model=identity,
        checkpoints=identities,
        checkpoint_differences=checkpoint_differences,
        content_keys={
            "settings": content_key(recorded_settings.model_dump(mode="json")),
            "model": identity.fingerprint,
            **{f"checkpoint {path}": other.fingerprint for path, other in identities.items()},
            "prompts": content_key([identity_of_prompt(prompt) for prompt in inputs.prompts]),
            **adapters,
            **package_keys(packages),
            **decisive_keys(versions, hardware, variables),
        },
        versions=versions,
        hardware=hardware,
        environment=variables,
        git=environment.git_state(),
        left_out=refused_sides,
        images=inputs.images,
        fp16_refused=next((str(error) for number, error in refusals.items() if number >= len(own_engines)), None),
        stages={stage.name: StageRecord() for stage in make_plan(recorded_settings).stages},
    )
    return Preparation(manifest, inputs.prompts, inputs.architectures)


def _with_images(settings: CompareSettings, prompts: Sequence[Prompt]) -> CompareSettings:
    """The settings of a run whose prompts may hold images: whole distributions are measured on contexts of text alone.

    Raises:
        UsageError: a side or a setting takes no images.
    """
    label = next((prompt.label for prompt in prompts if prompt.images), None)
    if label is None:
        return settings
    for mu in settings.infer_sides:
        assert mu.engine is not None
        require_images(mu.engine, label)
    if any(side.num_ranks for side in (*settings.infer_sides, *settings.train_sides)):
        raise UsageError(f"{label} holds an image, and ranks take prompts of text alone; leave ranks out")
    if settings.experts.num_sequences:
        raise UsageError(
            f"{label} holds an image, and experts are read in prompts of text alone; leave experts.num_sequences out"
        )
    return settings.model_copy(
        update={
            "full_vocabulary": settings.full_vocabulary.model_copy(update={"positions": 0}),
            "experts": settings.experts.model_copy(update={"num_sequences": 0}),
        }
    )


def identity_of_prompt(prompt: EncodedPrompt) -> list[Any]:
    """What makes a prompt this one: its ids, and the pixels of its images."""
    images = prompt.images
    return [prompt.prompt_id, prompt.token_ids, *([] if images is None else [images.pixels])]


def _fp16_start(starts: Sequence[Start]) -> list[Start]:
    """The first start in BF16 changed to FP16, which a report may advise; none where FP16 is requested anyway."""
    if any(dtype is Dtype.FP16 for _, dtype, _ in starts):
        return []
    return [(folder, Dtype.FP16, engine) for folder, dtype, engine in starts if dtype is Dtype.BF16][:1]


def without_refused(
    settings: CompareSettings, refusals: Mapping[str, MismatchProbeError]
) -> tuple[CompareSettings, dict[str, str]]:
    """The settings without the sides that the engine cannot compute, and each side's reason.

    Only a dtype is left out: the engine takes the same checkpoint with the same arguments in another dtype. A wrong
    argument is an error that the user has to fix.

    Raises:
        MismatchProbeError: a side was refused because of an argument, or every side was refused.
    """
    if not refusals:
        return settings, {}
    models_and_engines = [_model_and_engine(mu) for mu in settings.infer_sides if mu.name not in refusals]
    for mu in settings.infer_sides:
        error = refusals.get(mu.name)
        if (
            error is not None
            and not isinstance(error, StartRefused)
            and _model_and_engine(mu) not in models_and_engines
        ):
            raise error
    remaining_settings = settings.without_samplers(refusals)
    if remaining_settings is None:
        raise next(iter(refusals.values()))
    return remaining_settings, {name: str(error) for name, error in refusals.items()}


def _model_and_engine(mu: Side) -> tuple[ModelSettings, EngineSettings | None]:
    return mu.model, mu.engine


def _checkpoint_folders(settings: CompareSettings) -> dict[str, Path]:
    """The folders of the checkpoints that sides load, by the path in their settings."""
    others = [side for side in (*settings.train_sides, *settings.infer_sides) if side.model.path != settings.model.path]
    flags = {"mu": "--infer", "pi": "--train"}
    return {side.model.path: resolve_model(side.model, f"{flags[side.role]} {side.name}:checkpoint") for side in others}


def _checkpoint_differences(settings: CompareSettings, folders: Mapping[str, Path]) -> list[CheckpointDifference]:
    """The differences of two checkpoints, for every pair whose sides name two; each two checkpoints once."""
    paths = dict.fromkeys((settings.pi(pi).model.path, settings.mu(mu).model.path) for pi, mu in settings.pairs)
    return [checkpoint_difference((pi, folders[pi]), (mu, folders[mu])) for pi, mu in paths if pi != mu]


def _require_same_vocabulary(identity: ModelIdentity, config: dict[str, Any], others: Iterable[ModelIdentity]) -> None:
    """
    Raises:
        UsageError: a side's checkpoint has another vocabulary, where the same ids are other tokens.
    """
    size = checkpoint.vocab_size(config)
    for other in others:
        its = checkpoint.vocab_size(checkpoint.read_config(Path(other.folder)))
        if its != size:
            raise UsageError(
                f"the checkpoint {other.name} knows {its} token ids and {identity.name} knows {size}: the same ids "
                "are other tokens there; give a side a checkpoint with the same vocabulary"
            )


def _require_room_for_responses(
    settings: CompareSettings, prompts: list[EncodedPrompt], context_length: int | None
) -> None:
    """Require that each prompt leaves room for a response in the context."""
    check_lengths(prompts, settings.sampling.max_new_tokens, context_length)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    for mu in settings.infer_sides:
        assert mu.engine is not None
        check_room(mu.engine, longest.label, len(longest.token_ids))


def _require_computed_sides(settings: CompareSettings) -> None:
    logged_side = next((side for side in (*settings.infer, *settings.train) if side.logged), None)
    if logged_side is not None:
        raise UsageError(
            f"the side {logged_side.name} is one of a log, and a comparison computes its sides: leave logged out, or "
            "make a run of a log with `import`"
        )


def _require_packages(settings: CompareSettings) -> None:
    engines = {mu.engine.name for mu in settings.infer_sides if mu.engine is not None and not mu.logged}
    packages = [
        "torch",
        "transformers",
        *(name for engine in sorted(engines) for name in engine_provider(engine).packages),
    ]
    absent = [package for package in packages if find_spec(package) is None]
    if absent:
        install = INSTALL_SERVER if engines == {"server"} else INSTALL_ENGINES
        missing_packages = sorted(engines - set(ENGINES.built_in))
        advice = (
            f"install what the engine {' or '.join(missing_packages)} needs, or run {install}"
            if missing_packages
            else f"run {install}"
        )
        raise MissingExtra(f"a comparison runs real engines, and {', '.join(absent)} cannot be found here; {advice}")


def _resolved_settings(settings: CompareSettings, inputs: Inputs, config: dict[str, Any]) -> CompareSettings:
    """The settings with the values that were chosen for what the user left open."""
    size = settings.engine.batch_sequences or _BATCH_SEQUENCES
    experts = settings.experts
    if experts.num_sequences is None and has_experts(checkpoint.text_config(config)):
        experts = ExpertSettings(num_sequences=settings.floors.num_sequences)
    return settings.model_copy(
        update={
            "experts": experts,
            "prompts": settings.prompts.model_copy(update={"num_prompts": len(inputs.prompts)}),
            "engine": settings.engine.model_copy(update={"batch_sequences": size}),
            "training": settings.training.model_copy(update={"attention": inputs.attention}),
        }
    )


def default_run_path() -> Path:
    return Path("runs") / f"compare-{datetime.now(UTC):%Y%m%d-%H%M%S}"
