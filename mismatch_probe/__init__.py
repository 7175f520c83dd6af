"""Measure, explain, gate and guard the training-inference mismatch of language models.

The names of the Python API (docs/api.md) are loaded where they are first used, so that `import mismatch_probe` costs
nothing and never needs an engine. `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any, Final

__version__ = "0.1.0"

_PLACES: Final = {
    "Batch": "mismatch_probe.guards.batch",
    "Comparison": "mismatch_probe.api.comparison",
    "Decision": "mismatch_probe.guards.answers",
    "Guards": "mismatch_probe.guards.guards",
    "Probe": "mismatch_probe.guards.probe",
    "Sums": "mismatch_probe.guards.sums",
    "MismatchProbeError": "mismatch_probe.errors",
    "UsageError": "mismatch_probe.errors",
    "compare_logprobs": "mismatch_probe.api.compare_logprobs",
    "open_run": "mismatch_probe.api.comparison",
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
