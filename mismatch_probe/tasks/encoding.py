"""Prompts become token ids, once, for every leg; a chat template is a program and runs in a process of its own.

The process is a copy of this one, so it starts in no time and renders with the same library.
"""

import gc
import json
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from mismatch_probe.errors import UsageError, message_of
from mismatch_probe.images import encode_images, processor_template, text_with_images
from mismatch_probe.inert import cut_text
from mismatch_probe.records.sequences import EncodedPrompt, PromptImages
from mismatch_probe.tasks.problems import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_SECONDS: Final = 20.0
"""Of processor time, for one conversation: a template takes milliseconds, on a machine that is short of memory seconds.
"""
MOST_CHARACTERS: Final = 10_000_000
_MOST_BYTES: Final = 2**30
"""Of memory, besides what the process has when it starts."""
_MOST_WAITING_SECONDS: Final = 300.0
"""On a busy machine processor time passes slowly."""
_MOST_CHARACTERS_OF_A_REASON: Final = 1000

Conversation = tuple[str, list[Message]]
"""What a sentence calls the prompt, and its messages."""


@contextmanager
def render_texts(
    tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Conversation], fix: str
) -> Iterator[Iterator[str]]:
    """The text that the template makes of each conversation, one after the other; `fix` ends the sentence of an error.

    Raises (while they are taken):
        UsageError: the template fails, or takes more time, memory or room than a template needs.
    """
    if not conversations:
        yield iter(())
        return
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(tokenizer, conversations, reading, writing), daemon=True)
    _start(process)
    writing.close()
    try:
        yield (_receive(label, reading, process, fix) for label, _ in conversations)
    finally:
        process.kill()
        process.join()
        reading.close()


def _start(process: BaseProcess) -> None:
    """Ctrl-C is for the parent, which ends the child. The threads that a copy lacks belong to parts it does not use."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _receive(label: str, reading: Connection, process: BaseProcess, fix: str) -> str:
    endless = {"error": f"it came to no end within {MOST_SECONDS:g} s"}
    try:
        answer = json.loads(reading.recv_bytes()) if reading.poll(_MOST_WAITING_SECONDS) else endless
    except EOFError:
        process.join()
        was_killed = process.exitcode == -signal.SIGPROF
        answer = endless if was_killed else {"error": f"its process ended with {process.exitcode}"}
    if "error" in answer:
        raise UsageError(f"the chat template failed on {label} ({answer['error']}); {fix}")
    return str(answer["text"])


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Sequence[Conversation],
    reading: Connection,
    writing: Connection,
) -> None:
    reading.close()
    gc.disable()  # it would copy every page of the parent's objects
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _own_bytes() + _MOST_BYTES)
    for _, messages in conversations:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        writing.send_bytes(json.dumps(_render_or_explain(tokenizer, messages)).encode())


def _render_or_explain(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> dict[str, str]:
    try:
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        text.encode()
    except MemoryError:
        return {"error": f"it needs more than {_MOST_BYTES / 2**30:g} GiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template is a program and raises what it likes
        return {"error": cut_text(message_of(error), _MOST_CHARACTERS_OF_A_REASON, keep="start")}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"it made {len(text):,} characters, more than the {MOST_CHARACTERS:,} that are read"}
    return {"text": text}


def _own_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


ChatTemplate = Literal["auto", "always", "never"]

_PLAIN = '--chat-template never, or chat_template = "never" in a configuration file'
_FIX_TEMPLATE = f"fix its messages or the tokenizer's chat_template, or give text with {_PLAIN}"
_TRIED_CHARACTERS_A_TOKEN = 8
_LEAST_ROOM = 2
"""A response token, and the one that an engine decodes behind a response it scores again."""


def encode_prompts(
    prompts: list[Prompt],
    tokenizer: "PreTrainedTokenizerBase | None",
    chat_template: ChatTemplate,
    vocabulary: int | None = None,
    context_length: int | None = None,
    folder: Path | None = None,
) -> list[EncodedPrompt]:
    """Apply the chat template where it belongs and encode; `text` of the result is what its ids decode to.

    Messages always take the template. Text becomes one user message with `always`, stays plain with `never`; `auto`
    wraps it exactly if the tokenizer has a template. Recorded ids are taken as they are. `vocabulary` is the number of
    ids that the model knows, which may be more or fewer than its tokenizer makes; None where its config does not say.
    A text whose beginning alone exceeds `context_length` is read no further; None: all of it is read. Without a
    `tokenizer` every prompt must be token ids, and its text is empty. folder: of the checkpoint whose processor takes
    the images of prompts that hold any; None where none does.

    Raises:
        UsageError: no template where one is needed, one that fails, text that has been templated already, ids outside
            the vocabulary, a prompt with no tokens or with far too many, or an image that cannot be taken.
        MissingExtra: images need a package that is not installed.
    """
    if tokenizer is None:
        return [_of_ids(prompt, vocabulary) for prompt in prompts]
    if folder is not None and tokenizer.chat_template is None and any(prompt.images for prompt in prompts):
        tokenizer.chat_template = processor_template(folder)
    wrap_text = chat_template == "always" or (chat_template == "auto" and tokenizer.chat_template is not None)
    if chat_template == "always":
        _require_template(tokenizer)
    encoder = _Encoder(tokenizer, len(tokenizer) if vocabulary is None else vocabulary, context_length, folder)
    template_texts = [_messages_of_prompt(prompt, tokenizer, chat_template, wrap_text=wrap_text) for prompt in prompts]
    pairs = list(zip(prompts, template_texts, strict=True))
    conversations = [(prompt.label, messages) for prompt, messages in pairs if messages is not None]
    with render_texts(tokenizer, conversations, _FIX_TEMPLATE) as texts:
        return [encoder.encode(prompt, None if messages is None else next(texts)) for prompt, messages in pairs]


def check_lengths(prompts: list[EncodedPrompt], max_new_tokens: int, context_length: int | None) -> None:
    """Refuse prompts that leave no room for `max_new_tokens` in the context; None means that it is unbounded.

    Raises:
        UsageError: a prompt leaves none; the message names the longest one.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    num_tokens = len(longest.token_ids)
    if context_length is None or num_tokens + max(max_new_tokens, _LEAST_ROOM) <= context_length:
        return
    room = context_length - num_tokens
    fix = f"give --max-new-tokens {room} or less" if room >= _LEAST_ROOM else "shorten it or leave it out"
    raise UsageError(
        f"{longest.label} has {num_tokens} tokens, which with {max_new_tokens} new ones exceeds the model's "
        f"context of {context_length}; {fix}"
    )


def _messages_of_prompt(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", chat_template: ChatTemplate, *, wrap_text: bool
) -> list[Message] | None:
    """What of a prompt takes the chat template; None: it stays as it is."""
    if prompt.messages is not None:
        if chat_template == "never":
            raise UsageError(
                f"{prompt.label} is a list of messages, which --chat-template never cannot turn into text; "
                "give --chat-template auto, or prompts as text"
            )
        _require_template(tokenizer)
        return prompt.messages
    if prompt.text is None or not wrap_text:
        return None
    markers = [token for token in tokenizer.all_special_tokens if token in prompt.text]
    if markers:
        raise UsageError(
            f"{prompt.label} holds {markers[0]!r} already, and a second chat template would be put around it; "
            f"give {_PLAIN}"
        )
    return [{"role": "user", "content": prompt.text}]


@dataclass(frozen=True)
class _Encoder:
    """A tokenizer, and what of its ids the model takes."""

    tokenizer: "PreTrainedTokenizerBase"
    vocabulary: int
    context_length: int | None
    folder: Path | None = None

    def encode(self, prompt: Prompt, template_text: str | None) -> EncodedPrompt:
        """`template_text`: the text that the chat template made of it; None: it takes no template."""
        if prompt.images:
            assert template_text is not None
            return self._encode_images(prompt, template_text)
        if prompt.token_ids is not None:
            token_ids = prompt.token_ids
        elif template_text is not None:
            token_ids = self._ids(prompt.label, template_text, special_tokens=False)
        else:
            assert prompt.text is not None
            bos = self.tokenizer.bos_token
            starts_itself = bos is not None and prompt.text.startswith(bos)
            token_ids = self._ids(prompt.label, prompt.text, special_tokens=not starts_itself)
        _require_tokens(prompt, token_ids)
        _require_known(prompt, token_ids, self.vocabulary)
        text = str(self.tokenizer.decode(token_ids))
        return EncodedPrompt(prompt.prompt_id, token_ids, text, prompt.answer, where=prompt.where)

    def _encode_images(self, prompt: Prompt, text: str) -> EncodedPrompt:
        assert self.folder is not None
        engine_token_ids = self._ids(prompt.label, text, special_tokens=False)
        token_ids, facts = encode_images(self.folder, text, prompt.images, prompt.label)
        _require_known(prompt, token_ids, self.vocabulary)
        images = PromptImages(
            folder=str(self.folder),
            paths=prompt.images,
            num_prompt=len(token_ids),
            text=text,
            engine_token_ids=engine_token_ids,
            **facts,
        )
        shown_text = text_with_images(self.tokenizer, self.folder, token_ids)
        return EncodedPrompt(prompt.prompt_id, token_ids, shown_text, prompt.answer, images, where=prompt.where)

    def _ids(self, label: str, text: str, *, special_tokens: bool) -> list[int]:
        if self.context_length is not None:
            self._require_fit(label, text, self.context_length)
        return list(self.tokenizer.encode(text, add_special_tokens=special_tokens))

    def _require_fit(self, label: str, text: str, context_length: int) -> None:
        """Ever longer beginnings of a long text are tried: a token may be any number of characters."""
        length = _TRIED_CHARACTERS_A_TOKEN * context_length
        while length < len(text):
            num_tokens = len(self.tokenizer.encode(text[:length], add_special_tokens=False))
            if num_tokens > context_length:
                raise UsageError(
                    f"{label} has {len(text)} characters, and the first {length} alone are {num_tokens} tokens, which "
                    f"exceeds the model's context of {context_length}; shorten it or leave it out"
                )
            length *= 2


def _of_ids(prompt: Prompt, vocabulary: int | None) -> EncodedPrompt:
    assert prompt.token_ids is not None
    _require_tokens(prompt, prompt.token_ids)
    if vocabulary is not None:
        _require_known(prompt, prompt.token_ids, vocabulary)
    return EncodedPrompt(prompt.prompt_id, prompt.token_ids, "", prompt.answer, where=prompt.where)


def _require_tokens(prompt: Prompt, token_ids: list[int]) -> None:
    if not token_ids:
        raise UsageError(f"{prompt.label} has no tokens, so nothing can follow it; give it text, or remove it")


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
