"""The language-model head on chunks of hidden states, through the model's own code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from mismatch_probe.errors import EngineError


class ChunkedHead:
    """Splits a causal LM's forward into its body, run once, and its head, run on as few tokens at a time as wanted.

    Both halves call the model's own forward with the base model's forward exchanged, so whatever the model does to its
    logits (soft caps, scales), and hooks around it (FSDP, accelerate), happens as it would in one pass. Nothing of size
    [tokens, vocabulary] exists beyond one chunk.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Raises:
            EngineError: the model has no body apart from its head.
        """
        self._model = model
        self._base: torch.nn.Module = model.base_model
        self._body_outputs: Any = None
        if self._base is model:
            raise EngineError(
                f"{type(model).__name__} has no base model apart from its head, so its log-probs cannot be computed "
                "in chunks; use a causal language model of transformers"
            )

    def body(self, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        """Final hidden states [B, S, D] of ids [B, S]; `others` are further arguments of the model's forward."""
        base_forward = self._base.forward
        hidden_states: list[torch.Tensor] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = base_forward(*args, **kwargs)
            hidden_states.append(outputs.last_hidden_state)
            outputs.last_hidden_state = outputs.last_hidden_state[:, :1]
            self._body_outputs = outputs
            return outputs

        with forward_exchanged(self._base, forward):
            self._model(input_ids=input_ids, use_cache=False, **others)
        return hidden_states[0]

    @property
    def last_hidden(self) -> torch.Tensor:
        """Some of the hidden states [1, T, D] that it had last."""
        hidden_1TD: torch.Tensor = self._body_outputs.last_hidden_state
        return hidden_1TD

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of some of the hidden states, after whatever the model does to them."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._body_outputs.last_hidden_state = hidden_TD[None]
            return self._body_outputs

        with forward_exchanged(self._base, forward):
            input_ids = torch.zeros((1, 1), dtype=torch.long, device=self._model.device)
            logits_1TV: torch.Tensor = self._model(input_ids=input_ids, use_cache=False).logits
        return logits_1TV[0]


@contextmanager
def forward_exchanged(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module's forward is this one."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
