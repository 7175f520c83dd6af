"""A server's side as the tests start it."""

from pathlib import Path
from typing import Any

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.start import start_engine
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest
from tests.servers.real_server import demo_checkpoint

MOST_TOKENS = 12


def started(
    url: str,
    sampling: SamplingSettings | None = None,
    *,
    prefill: bool = False,
    prefix_caching: bool = True,
    checkpoint: Path | None = None,
    **args: Any,
) -> Engine:
    """Impatient: a failure is tried again once, and a request has ten seconds."""
    given = {"url": url, "tries": 2, "timeout_seconds": 10.0, **args}
    settings = EngineSettings(name="server", prefill=prefill, prefix_caching=prefix_caching, args=given)
    plain = sampling or SamplingSettings(max_new_tokens=MOST_TOKENS)
    return start_engine(str(checkpoint or demo_checkpoint()), Dtype.BF16, settings, plain, max_model_len=200)


def requests(count: int = 6) -> list[SampleRequest]:
    """Prompts of 5, 6, ... tokens, each with a seed of its own."""
    prompts = [[(13 * number + 5 * place) % 100 + 3 for place in range(5 + number)] for number in range(count)]
    return [
        SampleRequest(f"r{number}", EncodedPrompt(f"p{number}", ids, ""), number) for number, ids in enumerate(prompts)
    ]
