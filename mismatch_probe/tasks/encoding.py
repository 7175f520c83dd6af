"""Prompts become token ids here, once: every leg scores the ids that this room fixed."""

from typing import TYPE_CHECKING, Literal

from mismatch_probe.errors import UsageError, said
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks.prompt import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatTemplate = Literal["auto", "always", "never"]

_PLAIN = '--chat-template never, or chat_template = "never" in a configuration file'
_LEAST_ROOM = 2
"""A response token, and the one that an engine decodes behind a response it scores again."""


def encode_prompts(
    prompts: list[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    chat_template: ChatTemplate,
    vocabulary: int | None = None,
) -> list[EncodedPrompt]:
    """Apply the chat template where it belongs and encode; `text` of the result is what its ids decode to.

    Messages always take the template. Text becomes one user message with `always`, stays plain with `never`; `auto`
    wraps it exactly if the tokenizer has a template. Recorded ids are taken as they are. `vocabulary` is the number of
    ids that the model knows, which may be more or fewer than its tokenizer makes; None where its config does not say.

    Raises:
        UsageError: no template where one is needed, one that fails, text that has been templated already, ids outside
            the vocabulary, or a prompt with no tokens.
    """
    wrap_text = chat_template == "always" or (chat_template == "auto" and tokenizer.chat_template is not None)
    if chat_template == "always":
        _require_template(tokenizer)
    known = len(tokenizer) if vocabulary is None else vocabulary
    return [_encode(prompt, tokenizer, chat_template, known, wrap_text=wrap_text) for prompt in prompts]


def check_lengths(prompts: list[EncodedPrompt], max_new_tokens: int, context_length: int | None) -> None:
    """Refuse prompts that leave no room for `max_new_tokens` in the context; None means that it is unbounded.

    Raises:
        UsageError: naming the longest prompt.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    num_tokens = len(longest.token_ids)
    if context_length is None or num_tokens + max(max_new_tokens, _LEAST_ROOM) <= context_length:
        return
    room = context_length - num_tokens
    mend = f"give --max-new-tokens {room} or less" if room >= _LEAST_ROOM else "shorten it or leave it out"
    raise UsageError(
        f"{longest.label} has {num_tokens} tokens, which with {max_new_tokens} new ones exceeds the model's "
        f"context of {context_length}; {mend}"
    )


def _encode(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template: ChatTemplate,
    vocabulary: int,
    *,
    wrap_text: bool,
) -> EncodedPrompt:
    if prompt.token_ids is not None:
        token_ids = prompt.token_ids
    elif prompt.messages is not None:
        if chat_template == "never":
            raise UsageError(
                f"{prompt.label} is a list of messages, which --chat-template never cannot turn into text; "
                "give --chat-template auto, or prompts as text"
            )
        token_ids = _apply_template(prompt.label, prompt.messages, tokenizer)
    else:
        assert prompt.text is not None
        token_ids = _encode_text(prompt.label, prompt.text, tokenizer, wrap=wrap_text)
    if not token_ids:
        raise UsageError(f"{prompt.label} has no tokens, so nothing can follow it; give it text, or remove it")
    _require_known(prompt, token_ids, vocabulary)
    return EncodedPrompt(
        prompt.prompt_id, token_ids, str(tokenizer.decode(token_ids)), prompt.answer, where=prompt.where
    )


def _encode_text(label: str, text: str, tokenizer: "PreTrainedTokenizerBase", *, wrap: bool) -> list[int]:
    if not wrap:
        starts_itself = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(text, add_special_tokens=not starts_itself))
    markers = [token for token in tokenizer.all_special_tokens if token in text]
    if markers:
        raise UsageError(
            f"{label} holds {markers[0]!r} already, and a second chat template would be put around it; give {_PLAIN}"
        )
    return _apply_template(label, [{"role": "user", "content": text}], tokenizer)


def _apply_template(label: str, messages: list[Message], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    _require_template(tokenizer)
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # a template is a program and raises what it likes
        raise UsageError(
            f"the chat template failed on {label} ({said(error)}); mend its messages or the tokenizer's "
            f"chat_template, or give text with {_PLAIN}"
        ) from error


def _require_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    if tokenizer.chat_template is None:
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, and messages need one; give text prompts "
            f"with {_PLAIN}, or a model with a template"
        )


def _require_known(prompt: Prompt, token_ids: list[int], vocabulary: int) -> None:
    unknown = next((token_id for token_id in token_ids if token_id >= vocabulary), None)
    if unknown is None:
        return
    if prompt.token_ids is not None:
        raise UsageError(
            f"{prompt.label} holds token id {unknown}, outside the model's vocabulary of {vocabulary}; "
            "give --model the checkpoint whose tokenizer made the ids"
        )
    raise UsageError(
        f"the tokenizer gives {prompt.label} the token id {unknown}, outside the model's vocabulary of {vocabulary}: "
        "it is another model's; give --model a folder with its own tokenizer"
    )
