"""What `localize` looks into: a checkpoint, a dtype for each side, prompts, and how closely."""

from typing import Any, Final, Self

from pydantic import Field, model_validator

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import (
    DtypeField,
    EngineSettings,
    FloorSettings,
    FullVocabularySettings,
    ModelSettings,
    PromptSettings,
    ReferenceSettings,
    SamplingSettings,
    Settings,
    TrainingPathSettings,
)
from mismatch_probe.dtypes import Dtype

DEFAULT_NUM_PROMPTS: Final = 16
DEFAULT_BATCH_TOKENS: Final = 2048


class LocalizeSettings(Settings):
    """One run of `localize`.

    modules: every module, not only every block. interventions: also measure what higher precision of a part would gain.
    switches: also what other ways to run the engine would, each of which is a start of its own.
    most_stored_bytes: activations kept on disk at a time; sequences that do not fit are left out of the attribution.
    """

    model: ModelSettings
    train_dtype: DtypeField = Dtype.BF16
    infer_dtype: DtypeField = Dtype.BF16
    prompts: PromptSettings = PromptSettings(num_prompts=DEFAULT_NUM_PROMPTS)
    sampling: SamplingSettings = SamplingSettings(max_new_tokens=128)
    engine: EngineSettings = EngineSettings()
    training: TrainingPathSettings = TrainingPathSettings(batch_tokens=DEFAULT_BATCH_TOKENS)
    modules: bool = False
    interventions: bool = True
    switches: bool = False
    most_stored_bytes: int = Field(default=4 * 2**30, gt=0, lt=2**63)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)

    @model_validator(mode="after")
    def _plain_weights(self) -> Self:
        if self.engine.adapter is not None or self.training.adapter is not None:
            raise ValueError(
                "localize looks into plain weights; merge the adapter into a checkpoint, and leave engine.adapter and "
                "training.adapter unset"
            )
        return self

    @model_validator(mode="after")
    def _plain_sampling(self) -> Self:
        if (self.sampling.temperature, self.sampling.top_p, self.sampling.top_k) != (1.0, 1.0, 0):
            raise ValueError(
                "localize compares the model's own probabilities; leave temperature, top_p and top_k unset"
            )
        return self

    def as_comparison(self) -> CompareSettings:
        """The same two sides for what prepares a comparison; hooks need an engine without compiled graphs."""
        engine = self.engine.model_copy(update={"args": {**self.engine.args, "enforce_eager": True}})
        return CompareSettings(
            model=self.model,
            pairs=((self.train_dtype, self.infer_dtype),),
            prompts=self.prompts,
            sampling=self.sampling,
            engine=engine,
            training=self.training,
            reference=ReferenceSettings(rounded_weights=False),
            floors=FloorSettings(num_sequences=0),
            full_vocabulary=FullVocabularySettings(positions=0),
            confidence=self.confidence,
        )


def localize_values(run: CompareSettings) -> dict[str, Any]:
    """What a comparison ran with, for a closer look: fewer prompts, small batches, the model's own probabilities.

    The dtypes are left out where the run has several pairs.
    """
    values = run.model_dump(mode="json", include={"model", "prompts", "engine", "training", "confidence"})
    values["prompts"]["num_prompts"] = min(run.prompts.num_prompts or DEFAULT_NUM_PROMPTS, DEFAULT_NUM_PROMPTS)
    values["training"]["batch_tokens"] = min(run.training.batch_tokens, DEFAULT_BATCH_TOKENS)
    values["sampling"] = run.sampling.model_dump(include={"max_new_tokens", "seed", "ignore_eos"})
    if len(run.pairs) == 1 and not (run.train or run.infer):
        values["train_dtype"], values["infer_dtype"] = run.pairs[0]
    return values
