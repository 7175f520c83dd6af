# mypy: allow-untyped-calls
"""The experts that a training path chooses for given tokens, read where they are handed to the experts."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mismatch_probe.errors import RoutingUnseen
from mismatch_probe.records.activations import ActivationBatch
from mismatch_probe.records.routing import SequenceRouting, by_sequence
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.inside.rows import Layout
from mismatch_probe.training_path.inside.scoring import BatchPass
from mismatch_probe.training_path.precision import undivided_modules

_EXPERTS: Final = "experts"
Choice = tuple[Tensor, Tensor]


def record_routing(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
    """Run the sequences in one pass, in the arithmetic that is active, and keep what every router chose.

    Raises:
        RoutingUnseen: the model hands no choice of experts to a module of that name.
    """
    batch = ActivationBatch(0, 0, list(sequences), [])
    layout = Layout.of(batch, model.device)
    with _choices(model) as chosen:
        BatchPass.run(model, batch)
    if not chosen:
        raise RoutingUnseen(
            f"{type(model).__name__} hands no choice of experts to a module called {_EXPERTS}, so it cannot be read; "
            "a dense model has none"
        )
    layers = tuple(sorted(chosen))
    experts_LTK, weights_LTK = (
        torch.stack([layout.pack(chosen[layer][part]).cpu() for layer in layers]) for part in range(2)
    )
    return by_sequence(sequences, layers, experts_LTK.int().numpy(), weights_LTK.float().numpy())


@contextmanager
def _choices(model: PreTrainedModel) -> Iterator[dict[int, Choice]]:
    """By layer, the ids and weights that its experts were last given."""
    chosen: dict[int, Choice] = {}
    with ExitStack() as stack:
        for number, layer in enumerate(undivided_modules(model)):
            for path, module in layer.named_modules():
                if path.rpartition(".")[2] == _EXPERTS:
                    handle = module.register_forward_pre_hook(_keeping(chosen, number), with_kwargs=True)
                    stack.callback(handle.remove)
        yield chosen


def _keeping(chosen: dict[int, Choice], layer: int) -> Any:
    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        ids = next((tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2), None)
        if ids is not None:
            weights = (tensor for tensor in tensors if tensor.is_floating_point() and tensor.shape == ids.shape)
            chosen[layer] = ids.detach().clone(), next(weights).detach().clone()

    return keep
