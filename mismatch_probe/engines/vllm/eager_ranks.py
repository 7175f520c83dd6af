"""Eager to the last function: vLLM compiles the one that ranks tokens by probability in eager engines too.

It counts how many tokens are more probable, so compiled or not it gives the same integers; compiling it costs each
process on a CPU about 2 s of processor.
"""

from typing import Any

import torch


def rank_eagerly(sampler: Any) -> None:
    """Make `sampler` gather log-probs and ranks without compiling anything."""
    gather = sampler.gather_logprobs

    def gather_eagerly(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return gather(*args, **kwargs)

    sampler.gather_logprobs = gather_eagerly
