"""What two sides' effective settings and configurations can be compared by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from numpy import float32

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_many, write_number
from mismatch_probe.reading import flat
from mismatch_probe.records.manifest import CheckpointDifference, ModelIdentity

WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward",
        "decoder_start_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "is_decoder",
        "is_encoder_decoder", "label2id", "max_position_embeddings", "output_attentions",
        "output_hidden_states", "output_router_logits", "pad_token_id", "problem_type", "return_dict",
        "router_aux_loss_coef", "sep_token_id", "torch_dtype", "transformers_version", "use_cache",
        "vocab_size",
    }
)  # fmt: skip
"""Keys of a transformers configuration that change no log-prob, or that an engine pads and rewrites for its own use."""

AGREEMENT: Final = "agreement_with_itself"
"""The effective setting of a reference that says how far its own passes are apart."""
_AGREES_NATS: Final = 1e-3
"""The most nats between two passes of one model in FP32: a hundred times what tiny and small models measure, and a
tenth of what rounding to BF16 costs.
"""


def contradiction(reference: Mapping[str, Any]) -> str | None:
    """How a reference, by its effective settings, contradicts itself; None where it agrees or that was not measured."""
    agreement = reference.get(AGREEMENT) or {}
    for name, how in _PASSES.items():
        nats = agreement.get(name)
        if nats is not None and not nats <= _AGREES_NATS:
            return (
                f"the reference does not agree with itself: {how} it gives the same tokens log-probs that are "
                f"{write_number(nats)} nats away (median of {write_many(agreement['num_tokens'], 'token')}), where "
                f"rounding makes less than {write_number(_AGREES_NATS)}"
            )
    return None


_PASSES: Final = {
    "again_nats": "in the same pass once more",
    "cached_nats": "one by one behind a cache",
    "shorter_nats": "without the last token of the response",
}

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def forward_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the forward pass, nested keys joined by dots; values are plain, unset ones left out."""
    settings = {key: value for key, value in config.items() if reaches_forward_pass(key)}
    return {name: _plain_value(value) for name, value in flat(settings) if value is not None and value != {}}


def reaches_forward_pass(name: str) -> bool:
    """Whether a setting, by its dotted name, can change a log-prob."""
    key = name.partition(".")[0]
    return key not in WITHOUT_EFFECT and not key.startswith("_")


def is_same_setting(train: Any, infer: Any) -> bool:
    """Whether two values compute the same, as numbers do that FP32 holds as one: 1e-5 and 9.999999747378752e-06."""
    if _is_number(train) and _is_number(infer):
        return bool(train == infer or float32(train) == float32(infer))
    return bool(train == infer)


def setting_words(name: str, train: Any, infer: Any) -> str:
    """`rope_theta is 10,000 on the training path and 500,000 in the engine`; the last part of a dotted name."""
    of_train, of_infer = _write_setting(train), _write_setting(infer)
    return f"{name.rsplit('.', 1)[-1]} is {of_train} on the training path and {of_infer} in the engine"


def _write_setting(value: Any) -> str:
    """A whole number without a point, which a configuration may or may not have; others as FP32 holds them."""
    if value is None:
        return "not set"
    if not _is_number(value):
        return str(value)
    number = value if isinstance(value, int) else float(float32(value))
    return f"{number:,.0f}" if float(number).is_integer() else f"{value:.7g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value if isinstance(value, str | int | float | bool) else str(value)


def has_experts(facts: Mapping[str, Any]) -> bool:
    """Whether the model is a mixture of experts."""
    return any(isinstance(facts.get(name), int) and facts[name] > 1 for name in EXPERT_COUNTS)


@dataclass(frozen=True)
class Sides:
    """One pair: what was asked of it, and what the loaded model (`train`) and the running engine (`infer`) say."""

    train_dtype: Dtype
    infer_dtype: Dtype
    train: Mapping[str, Any]
    infer: Mapping[str, Any]
    checkpoints: tuple[ModelIdentity, ModelIdentity] | None = None
    """Those that the training path and the engine loaded, None where it is the same without saying."""
    difference: CheckpointDifference | None = None
    """What these two were found to differ in; None where they are one, or in a run made before they were compared."""
    doubled_first_token: int | None = None
    """The token that every prompt begins with twice, None where there is none."""
    lacking_start: tuple[str, int, int] | None = None
    """The token that texts of this family begin with, how many prompts do not, and how many there are."""
    reference: Mapping[str, Any] = field(default_factory=dict)
    """What the loaded reference says; nothing where the pair has none."""

    @property
    def load_the_same(self) -> bool:
        """Whether both loaded the same weights."""
        if self.difference is not None:
            return not self.difference.weights.are_other
        return self.checkpoints is None or self.checkpoints[0].fingerprint == self.checkpoints[1].fingerprint

    @property
    def facts(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """What reaches the forward pass of the training path and of the engine; None where a side does not say."""
        train, infer = self.train.get("config"), self.infer.get("config")
        return None if train is None or infer is None else (train, infer)
