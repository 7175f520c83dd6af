"""The responses of a server that is asked for tokens alone, as text or as ids.

The endpoints in OpenAI's form are what a provider serves that gives no log-probs. A side of a comparison needs them,
so `PROTOCOLS` does not hold these two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from mismatch_probe.config.examinations import AUDIT_PROMPTS, AuditSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.engines.server.answers import Question, ServerAnswer, ServerProtocol, member, whole_numbers
from mismatch_probe.engines.server.arguments import ServerArguments
from mismatch_probe.engines.server.client import Client, Contact, contact
from mismatch_probe.engines.server.connection import Connection
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.provenance import checkpoint
from mismatch_probe.provenance.environment import sequence_seed
from mismatch_probe.records.sequences import EncodedPrompt, TokenSequence
from mismatch_probe.tasks import Prompt, check_lengths, encode_prompts, load_prompts, load_tokenizer, tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompletionTokens(ServerProtocol):
    """Prompts as token ids; token ids come back from servers that have `return_token_ids`, text from others."""

    path: ClassVar[str] = "/v1/completions"
    server: ClassVar[str] = "OpenAI"

    def body(self, question: Question, model: str) -> dict[str, Any]:
        return {
            **question.sampling,
            "model": model,
            "prompt": question.prompt_ids,
            "stream": False,
            "echo": False,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def answers(self, content: Any) -> list[ServerAnswer]:
        return [_answer(choice, choice, member(choice, "text", str)) for choice in _choices(content)]


class ChatTokens(ServerProtocol):
    """Conversations as messages, which the server puts into its own chat template."""

    path: ClassVar[str] = "/v1/chat/completions"
    server: ClassVar[str] = "OpenAI"

    def body(self, question: Question, model: str) -> dict[str, Any]:
        return {
            **question.sampling,
            "model": model,
            "messages": [{"role": role, "content": text} for role, text in question.messages],
            "stream": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def answers(self, content: Any) -> list[ServerAnswer]:
        return [
            _answer(choice, content, member(member(choice, "message", dict), "content", (str, type(None))) or "")
            for choice in _choices(content)
        ]


def _choices(content: Any) -> list[Any]:
    choices: list[Any] = member(content, "choices", list)
    return sorted(choices, key=lambda choice: member(choice, "index", int))


def _answer(choice: Any, holds_prompt: Any, text: str) -> ServerAnswer:
    """holds_prompt: the table that has the prompt's ids, where the server gives them."""
    token_ids = choice.get("token_ids")
    prompt_ids = holds_prompt.get("prompt_token_ids")
    return ServerAnswer(
        token_ids=[] if token_ids is None else whole_numbers(token_ids, "token_ids"),
        logprobs=np.zeros(0, dtype=np.float32),
        candidates=[],
        finish_reason=str(choice.get("finish_reason")),
        prompt_ids=None if prompt_ids is None else whole_numbers(prompt_ids, "prompt_token_ids"),
        text=text if token_ids is None else None,
    )


_KEEP: Final = "keep its weights while it is audited, and audit it again"


@dataclass(frozen=True)
class ServedResponses:
    """What came back, in the order of the prompts; responses without a token are left out."""

    sequences: list[TokenSequence]
    """Prompts as the server had them, where it says so."""
    seeds: list[int]
    prompt_numbers: list[int]
    finish_reasons: list[str]
    server: Contact
    is_text: bool
    """Whether the ids were made of text again."""
    other_prompts: list[tuple[list[int], list[int]]]
    """Prompts by our own template and by the server's, where these differ."""
    num_empty: int


def load_questions(settings: AuditSettings, folder: Path) -> tuple[list[Prompt], list[EncodedPrompt]]:
    """The prompts, and their ids by the checkpoint's own tokenizer and template.

    Raises:
        UsageError: they cannot be read or encoded, or leave no room.
    """
    prompts = load_prompts(settings.prompts, seed=settings.sampling.seed)
    prompts = prompts[: settings.prompts.num_prompts or AUDIT_PROMPTS]
    tokenizer = tokenizer_for(prompts, folder, trust_remote_code=settings.model.trust_remote_code)
    config = checkpoint.read_config(folder)
    length = checkpoint.context_length(config)
    template = "always" if settings.server.chat else settings.prompts.chat_template
    encoded_prompts = encode_prompts(prompts, tokenizer, template, checkpoint.vocab_size(config), length)
    check_lengths(encoded_prompts, settings.sampling.max_new_tokens, length)
    return prompts, encoded_prompts


def ask_server(
    settings: AuditSettings,
    folder: Path,
    questions: tuple[list[Prompt], list[EncodedPrompt]],
    on_finished: Callable[[int, int], None],
) -> ServedResponses:
    """`on_finished` hears how many responses have come, of how many.

    Raises:
        UsageError: what answers is no server that can be asked so, or gives text and the checkpoint has no tokenizer.
        EngineError: it cannot be reached, fails, or lies.
    """
    prompts, encoded_prompts = questions
    sampling = settings.sampling
    values = settings.server.model_dump(include={"url", "model", "concurrency", "timeout_seconds", "tries"})
    if settings.server.key_variable is not None:
        values["key_variable"] = settings.server.key_variable
    arguments = parse_settings(ServerArguments, values)
    numbers = [number for number in range(len(encoded_prompts)) for _ in range(sampling.samples_per_prompt)]
    seeds = [
        sequence_seed(sampling.seed, encoded_prompts[number].prompt_id, place % sampling.samples_per_prompt)
        for place, number in enumerate(numbers)
    ]
    with Connection(arguments) as connection:
        protocol = ChatTokens() if settings.server.chat else CompletionTokens()
        server = contact(connection, arguments, protocol=protocol)
        vocabulary = checkpoint.vocab_size(checkpoint.read_config(folder))
        client = Client(connection, server, vocabulary, server.max_model_len or 2**31, _KEEP)
        answers = client.ask_all(
            [
                _question(settings, prompts[number], encoded_prompts[number], seed)
                for number, seed in zip(numbers, seeds, strict=True)
            ],
            [encoded_prompts[number].label for number in numbers],
            on_finished,
        )
    return _responses(settings, folder, encoded_prompts, server, numbers, seeds, answers)


def _question(settings: AuditSettings, prompt: Prompt, encoded_prompt: EncodedPrompt, seed: int) -> Question:
    sampling = settings.sampling
    return Question(
        list(encoded_prompt.token_ids),
        sampling.max_new_tokens,
        seed,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.ignore_eos,
        top=0,
        messages=_messages(prompt) if settings.server.chat else (),
    )


def _messages(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    if prompt.messages is not None:
        return tuple((message["role"], message["content"]) for message in prompt.messages)
    if prompt.text is None:
        raise UsageError(f"{prompt.label} is token ids, which --chat cannot send as messages; leave --chat out")
    return (("user", prompt.text),)


def _responses(
    settings: AuditSettings,
    folder: Path,
    encoded_prompts: Sequence[EncodedPrompt],
    server: Contact,
    numbers: Sequence[int],
    seeds: Sequence[int],
    answers: Sequence[ServerAnswer],
) -> ServedResponses:
    is_text = any(answer.text is not None for answer in answers)
    tokenizer = None
    if is_text:
        if not checkpoint.has_tokenizer(folder):
            raise UsageError(
                f"the server at {settings.server.url} gives text and no token ids, and the checkpoint has no tokenizer "
                "to make ids of it; give --model a folder with its tokenizer"
            )
        tokenizer = load_tokenizer(folder, trust_remote_code=settings.model.trust_remote_code)
    sequences, kept, other_prompts = [], [], []
    for place, (number, answer) in enumerate(zip(numbers, answers, strict=True)):
        ours = list(encoded_prompts[number].token_ids)
        prompt_ids = ours if answer.prompt_ids is None else answer.prompt_ids
        if prompt_ids != ours:
            other_prompts.append((ours, prompt_ids))
        token_ids = answer.token_ids if answer.text is None else _ids_of_text(tokenizer, ours, answer.text)
        if token_ids:
            sequences.append(TokenSequence(f"{encoded_prompts[number].prompt_id}/{place}", prompt_ids, token_ids))
            kept.append(place)
    if not sequences:
        raise EngineError(
            f"the server at {settings.server.url} gave no token for any prompt; see that the prompts ask for an answer"
        )
    return ServedResponses(
        sequences=sequences,
        seeds=[seeds[place] for place in kept],
        prompt_numbers=[numbers[place] for place in kept],
        finish_reasons=[answers[place].finish_reason for place in kept],
        server=server,
        is_text=is_text,
        other_prompts=other_prompts,
        num_empty=len(answers) - len(kept),
    )


def _ids_of_text(tokenizer: "PreTrainedTokenizerBase | None", prompt_ids: list[int], text: str) -> list[int]:
    """The ids behind the prompt's, of prompt and response tokenised together where that keeps the prompt's ids."""
    assert tokenizer is not None
    prompt = str(tokenizer.decode(prompt_ids))
    together = list(tokenizer.encode(prompt + text, add_special_tokens=False))
    if together[: len(prompt_ids)] == prompt_ids:
        return together[len(prompt_ids) :]
    return list(tokenizer.encode(text, add_special_tokens=False))
