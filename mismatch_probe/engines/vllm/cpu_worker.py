"""What the worker of a CPU has changed in vLLM: seeds that survive chunked prefill, and nothing that is compiled.

At each chunk of a prompt but the last, vLLM's V1 runner samples a token, throws it away and rewinds the request's
seeded generator through the Philox offset, which only CUDA's generators have: on a CPU it raises "CPU Generator does
not use offset". Here a spare generator draws the token that is thrown away.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch


class _SpareGenerator(torch.Generator):
    """Draws for one step; told to rewind, it hands the request's own generator back, undrawn."""

    hand_back: Callable[[], None]

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        self.hand_back()
        return self


def spare_discarded_draws(runner: Any) -> None:
    """Make the V1 model runner `runner` draw tokens it discards from spare generators."""
    sample = runner._sample

    def sample_sparing_generators(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        for index in np.flatnonzero(discarded).tolist():
            if index in generators:
                spare = _SpareGenerator(device="cpu")
                spare.hand_back = partial(generators.__setitem__, index, generators[index])
                generators[index] = spare
        return sample(*args, **kwargs)

    runner._sample = sample_sparing_generators


def compute_eagerly(runner: Any) -> None:
    """Make the model runner `runner` compile nothing: not how ranks are counted, not how a shared vocabulary is read.

    vLLM compiles single functions in eager engines too. They compute with integers and masks, so compiled or not they
    give the same; compiling one costs each process on a CPU 2 to 4 s of processor.
    """
    for name in ("execute_model", "sample_tokens"):
        setattr(runner, name, torch.compiler.set_stance("force_eager")(getattr(runner, name)))
