"""May the reference take fused kernels? Only where they compute the architecture's own formula, shown on the model.

On one batch, every attention module computes its output three times from the same queries, keys and values: by its
eager formula, by a fused kernel, and by its eager formula in FP64. The fused kernel is taken where its error against
FP64 is that of rounding: of the size of the eager formula's own. What a kernel leaves out is an error far larger.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.attention import EAGER_IN_BLOCKS, FUSED, eager_in_blocks, fused_sdpa
from mismatch_probe.training_path.double import Float64Throughout
from mismatch_probe.training_path.loading import has_sdpa, sdpa_leaves_out
from mismatch_probe.training_path.short_pass import short_pass_ids

_PROBE_TOKENS: Final = 128
_ALLOWED: Final = 8.0
_FUSED_KERNELS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_COMPARING: Final = "eager_beside_fused"


@dataclass(frozen=True)
class AttentionChoice:
    """What was chosen and why; errors are the largest of any module against FP64, in units of its largest value.

    They are None where fused kernels were not tried.
    """

    fused: bool
    why: str
    fused_error: float | None = None
    eager_error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose_reference_attention(model: PreTrainedModel, arithmetic: Arithmetic) -> AttentionChoice:
    """Give a model that computes `eager_in_blocks` fused attention where that is the same formula."""
    if model.config.get_text_config()._attn_implementation != EAGER_IN_BLOCKS:
        return AttentionChoice(False, "the model's attention cannot be exchanged")
    left_out = sdpa_leaves_out(model.config)
    if left_out is not None:
        return AttentionChoice(False, f"SDPA leaves out {left_out}")
    if not has_sdpa(model.config):
        return AttentionChoice(False, "transformers has no SDPA attention for this architecture")
    comparison = _Comparison()
    AttentionInterface.register(_COMPARING, comparison)
    AttentionMaskInterface.register(_COMPARING, sdpa_mask)
    model.set_attn_implementation(_COMPARING)
    with arithmetic.active():
        model(input_ids=short_pass_ids(model, _PROBE_TOKENS), use_cache=False)
    choice = comparison.choice()
    model.set_attn_implementation(FUSED if choice.fused else EAGER_IN_BLOCKS)
    return choice


class _Comparison:
    """An attention function that computes all three and returns the eager formula's output."""

    def __init__(self) -> None:
        self._fused_errors: list[float] = []
        self._eager_errors: list[float] = []
        self._refused = False

    def __call__(
        self,
        module: torch.nn.Module,
        query_BHSD: torch.Tensor,
        key_BHSD: torch.Tensor,
        value_BHSD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        tensors = (query_BHSD, key_BHSD, value_BHSD)
        eager, _ = eager_in_blocks(module, *tensors, attention_mask, **kwargs)
        with Float64Throughout():
            query, key, value = (tensor.double() for tensor in tensors)
            exact, _ = eager_in_blocks(module, query, key, value, attention_mask, **kwargs)
        unit = value_BHSD.abs().max().double()
        self._rounding = torch.finfo(query_BHSD.dtype).eps
        self._eager_errors.append(float((eager - exact).abs().max() / unit))
        try:
            with sdpa_kernel(_FUSED_KERNELS):
                fused, _ = fused_sdpa(module, *tensors, attention_mask, **kwargs)
        except RuntimeError:  # how PyTorch says that none of these kernels takes such tensors
            self._refused = True
        else:
            self._fused_errors.append(float((fused - exact).abs().max() / unit))
        return eager, None

    def choice(self) -> AttentionChoice:
        if self._refused or not self._fused_errors:
            return AttentionChoice(False, "no fused kernel takes this architecture's attention")
        within = (
            fused <= _ALLOWED * max(eager, self._rounding)
            for fused, eager in zip(self._fused_errors, self._eager_errors, strict=True)
        )
        holds = all(within)
        formula = "the architecture's formula within rounding" if holds else "another formula than the architecture's"
        return AttentionChoice(
            holds, f"a fused kernel computes {formula}", max(self._fused_errors), max(self._eager_errors)
        )
