"""A number for the numbers of a tensor, whatever their order: the same for a checkpoint's tensor and an engine's copy.

An engine lays weights out as its kernels like them: `q_proj`, `k_proj` and `v_proj` in one matrix, experts side by
side, a share on each worker, rows interleaved. A digest is a sum over elements, so those of the parts add up to that
of the whole, and padding with zeros adds nothing.
"""

from typing import Final

import torch

_IN_CACHE: Final = 2**17
_AT_A_TIME: Final = 2**24
"""Elements: what a processor's caches hold; what costs little of a device's memory."""
_FACTOR: Final = -1640531535
"""Odd. x (2 x + _FACTOR) gives each 32-bit number another one, products wrapping [Rivest et al. 1998, RC6]."""
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def weight_digest(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of every element's mixed bits, an int64 without dimensions on the tensor's device; 0 and -0 give 0."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    matrix = tensor.detach()
    if matrix.dim() == 2 and matrix.t().is_contiguous():
        matrix = matrix.t()
    for part in torch.split(matrix.reshape(-1), _IN_CACHE if tensor.device.type == "cpu" else _AT_A_TIME):
        has_two_zeros = part.is_floating_point() and part.element_size() > 1
        bits = (part + 0 if has_two_zeros else part).view(_BITS[part.element_size()]).to(torch.int32)
        if part.element_size() > 2:
            bits = bits ^ (bits >> 16)
        total += (bits * 2).add_(_FACTOR).mul_(bits).sum(dtype=torch.int64)
    return total


def as_numbers(digests: list[torch.Tensor]) -> list[int]:
    """Their values, brought from the device at once."""
    numbers: list[int] = torch.stack(digests).tolist() if digests else []
    return numbers
