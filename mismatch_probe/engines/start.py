"""Start an engine by name; only then is its library loaded."""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine, Products


def start_engine(
    checkpoint: str,
    dtype: Dtype,
    engine: EngineSettings,
    sampling: SamplingSettings,
    *,
    max_model_len: int,
    num_sequences: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    products: Products = nullcontext,
) -> Engine:
    """Load `checkpoint` (a folder or a hub id) in `dtype` into the engine that `engine.name` names.

    `max_model_len` [tokens] is the longest prompt + response plus one position, which replay's obligatory output token
    takes; it must not exceed the checkpoint's context. `num_sequences` is how many a call gives at most, for which a
    CPU engine makes room; None: it is not known. `products` is entered around every computation of an engine that
    runs eagerly in this process: who trains on a CPU can give both sides the same matrix products.

    Raises:
        MissingExtra: the engine's library is not installed.
        UsageError: an argument, the checkpoint or the sampling settings cannot be used.
        OutOfMemory: the model or its KV cache does not fit.
        EngineError: the engine could not start, or runs another dtype than the one asked for.
    """
    start: Callable[..., Engine] = engine_part(engine.name).start
    return start(
        checkpoint,
        dtype,
        engine,
        sampling,
        max_model_len=max_model_len,
        num_sequences=num_sequences,
        revision=revision,
        trust_remote_code=trust_remote_code,
        seed=seed,
        products=products,
    )


def packages_of(name: str) -> tuple[str, ...]:
    """What has to be installed for an engine besides the training path's packages."""
    packages: tuple[str, ...] = engine_part(name).PACKAGES
    return packages


def engine_part(name: str, part: str = "") -> Any:
    """The folder of an engine, or a file of it; every engine has `start`, `arguments`, `limits` and `rehearse`."""
    return import_module(".".join(filter(None, (__package__, name, part))))
