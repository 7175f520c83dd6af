"""What a guard may ask of its metrics: one file a family of rules, each rule by its name in `RULES`; and guard files.

The default guards are a guard file too. Every mistake in one is one sentence that says where.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from mismatch_probe.config.load import parse_settings, read_settings_file
from mismatch_probe.config.model import ListAsTuple, Settings
from mismatch_probe.errors import UsageError, did_you_mean
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


DEFAULTS_FILE: Final = Path(__file__).parents[1] / "defaults.toml"
"""The default guards, in the format of a guard file; it ships with the package."""


class GuardFileSettings(Settings):
    """The top of a guard file."""

    defaults: bool = True
    """Whether to keep the default guards that no [[guard]] of the same name replaces."""
    off: Annotated[tuple[str, ...], ListAsTuple] = ()
    """Which of them to leave out."""


def load_guards(path: Path) -> tuple[GuardSettings, ...]:
    """The guards a file asks for: the defaults it keeps, then its own.

    Raises:
        UsageError: the file cannot be read, or a key, a rule, an action or a threshold in it cannot be used.
    """
    return parse_guards(read_settings_file(path, flag="--guards"), str(path))


def parse_guards(content: Mapping[str, Any], where: str) -> tuple[GuardSettings, ...]:
    """As `load_guards`, from the parsed file; `where` names it in messages."""
    tables = content.get("guard", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise UsageError(f"{where}: guard is no list of tables; write each guard under [[guard]]")
    top = {key: value for key, value in content.items() if key != "guard"}
    file = parse_settings(GuardFileSettings, top, where)
    own = [_guard(table, f"{where}, guard {table.get('name', number)}") for number, table in enumerate(tables, start=1)]
    names = [guard.name for guard in own]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UsageError(f"{where}: the guard {duplicate!r} is declared twice; rename or remove one")
    defaults = _defaults(file, names, where)
    if not defaults and not own:
        raise UsageError(f"{where} leaves no guard, so nothing would be guarded; add a [[guard]], or keep the defaults")
    return (*defaults, *own)


def recorded_guards(tables: Iterable[Mapping[str, Any]], where: str) -> tuple[GuardSettings, ...]:
    """The guards that a run wrote down when it started; `where` names the file in messages."""
    return tuple(_guard(table, f"{where}, guard {table.get('name')}") for table in tables)


def _defaults(file: GuardFileSettings, names_to_replace: Iterable[str], where: str) -> list[GuardSettings]:
    """The default guards that the file keeps."""
    defaults = DEFAULT_GUARDS if file.defaults else ()
    names = [guard.name for guard in defaults]
    unknown = next((name for name in file.off if name not in names), None)
    if unknown is not None:
        hint = did_you_mean(unknown, names)
        raise UsageError(f"{where}: off names {unknown!r}, which is no default guard in use{hint}")
    return [guard for guard in defaults if guard.name not in {*file.off, *names_to_replace}]


def _guard(table: Mapping[str, Any], where: str) -> GuardSettings:
    rule = table.get("rule")
    settings = RULES.get(rule) if isinstance(rule, str) else None
    if settings is None:
        names = RULES.names()
        hint = did_you_mean(rule, names, f"; give one of {', '.join(names)}")
        problem = "has no rule" if rule is None else f"has an unknown rule {rule!r}"
        raise UsageError(f"{where} {problem}{hint}")
    return parse_settings(settings, table, where)


DEFAULT_GUARDS: Final = load_guards(DEFAULTS_FILE)
"""Guards a user can leave alone: bands in use elsewhere, each with its source, and levels relative to the run's own."""
