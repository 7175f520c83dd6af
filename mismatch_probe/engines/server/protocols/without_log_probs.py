"""The endpoints in OpenAI's form, asked for tokens alone: what a provider serves that gives no log-probs.

They are not for a side of a comparison, which needs log-probs, so `PROTOCOLS` does not hold them.
"""

from typing import Any, ClassVar

import numpy as np

from mismatch_probe.engines.server.answers import Question, ServerAnswer, ServerProtocol, member, whole_numbers


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
