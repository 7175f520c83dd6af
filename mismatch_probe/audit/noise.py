"""The random numbers that a seed stands for in a server's sampler, so that each of its tokens can be foretold.

A sampler that adds Gumbel noise to the logits and takes the largest sum draws from their softmax [Maddison, Tarlow
and Minka 2014, NIPS]. With the noise known, the sampled token is a function of the logits [arXiv 2511.20621].
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from mismatch_probe.stats.sequences import Floats

_Words = npt.NDArray[np.uint64]
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MOST_SEED: Final = 2**31


def step_seeds(seed: int, num_tokens: int) -> list[int]:
    """The seed of each token's noise in vLLM on a CPU: a request's generator gives one number a step."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(0, _MOST_SEED, (1,), generator=generator, dtype=torch.long) for _ in range(num_tokens)]
    return [int(number) for number in numbers]


def gumbel_noise(seeds: Sequence[int], vocab_size: int) -> Floats:
    """Noise [T, V] of the tokens with these seeds: SplitMix64 of seed and token id [Steele, Lea and Flood 2014,
    OOPSLA], as vLLM's kernel for CPUs has it in 0.32.
    """
    with np.errstate(over="ignore"):
        keys_T1 = _mix(np.asarray(seeds, dtype=np.uint64))[:, None]
        bits = _mix(keys_T1 + np.arange(1, vocab_size + 1, dtype=np.uint64) * _GAMMA) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(uniform)))


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
