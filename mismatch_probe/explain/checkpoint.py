"""What a checkpoint's files say that hypotheses are made of: special tokens, its template's header, its RoPE base."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mismatch_probe.config.explain import ExplainSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.explain.contexts import SpecialTokens
from mismatch_probe.explain.templates import headers_of, templates
from mismatch_probe.provenance.checkpoint import has_tokenizer
from mismatch_probe.tasks.model import load_tokenizer


def special_tokens(settings: ExplainSettings, model: PreTrainedModel) -> SpecialTokens:
    """From the model's config and, where it has one, its tokenizer.

    Raises:
        UsageError: the tokenizer cannot be read, or is needed for the text of a header and not there.
    """
    config: Any = model.config.get_text_config()
    named = [_ids(getattr(config, f"{name}_token_id", None)) for name in ("bos", "pad", "eos")]
    tokenizer: Any = None
    if has_tokenizer(Path(settings.model.path)):
        tokenizer = load_tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
    special = frozenset() if tokenizer is None else frozenset(tokenizer.all_special_ids)
    around, refused = templates(tokenizer) if tokenizer is not None and settings.chat_template else ([], [])
    bos = [*named[0], *_ids(getattr(tokenizer, "bos_token_id", None))]
    pads = list(dict.fromkeys([*named[1], *_ids(getattr(tokenizer, "pad_token_id", None)), *named[2][:1]])) or [0]
    return SpecialTokens(
        bos=bos[0] if bos else None,
        pads=tuple(pads[:2]),
        special=special,
        headers=tuple(dict.fromkeys((*_given_headers(settings, tokenizer), *headers_of(around, special)))),
        templates=tuple(around),
        refused=tuple(refused),
        longest=getattr(config, "max_position_embeddings", None),
    )


def rope_base(model: PreTrainedModel) -> float | None:
    """None where the config does not say one for all layers."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None)
    base = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return float(base) if isinstance(base, int | float) else None


def _given_headers(settings: ExplainSettings, tokenizer: Any) -> Iterator[tuple[int, ...]]:
    yield from settings.headers
    for text in settings.header_texts:
        if tokenizer is None:
            raise UsageError(
                f"the header {text!r} cannot be encoded, as {settings.model.path} has no tokenizer; give its token "
                "ids: --header 1,2,3"
            )
        yield tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ids(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
