"""What a guard may ask of its metrics: one file a family of rules, each rule by its name in `RULES`."""

from typing import Final

from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.rules.bounds import BeyondSettings, FlatlineSettings, LimitSettings, NonfiniteSettings
from mismatch_probe.guards.rules.growth import GrowthSettings
from mismatch_probe.guards.rules.mean import CanaryFloorSettings, MeanSettings
from mismatch_probe.guards.rules.trend import CusumSettings, TrendSettings
from mismatch_probe.plugins import ContractError, Registry


def _require_rule(name: str, value: object) -> type[GuardSettings]:
    if not (isinstance(value, type) and issubclass(value, GuardSettings)):
        raise ContractError("it is no class of mismatch_probe.guards.rules.base.GuardSettings")
    if value.model_fields["rule"].default != name:
        raise ContractError(f'its field is not rule: Literal["{name}"] = "{name}", as its entry point is called')
    return value


RULES: Final[Registry[type[GuardSettings]]] = Registry(
    "guard rule",
    "mismatch_probe.guards",
    {
        "limit": LimitSettings,
        "nonfinite": NonfiniteSettings,
        "growth": GrowthSettings,
        "beyond": BeyondSettings,
        "cusum": CusumSettings,
        "trend": TrendSettings,
        "mean": MeanSettings,
        "flatline": FlatlineSettings,
        "floor": CanaryFloorSettings,
    },
    _require_rule,
)
"""By the name that a `[[guard]]` gives as its rule."""
