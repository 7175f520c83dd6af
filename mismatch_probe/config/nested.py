"""Tables in tables, as settings are: made from dotted names, made flat, laid over each other, compared."""

from collections.abc import Iterator, Mapping
from typing import Any

SettingsTable = Mapping[str, Any]


def nest_names(by_dotted_name: SettingsTable) -> dict[str, Any]:
    """`{"model.path": "x"}` as `{"model": {"path": "x"}}`; what is None is left out."""
    tables: dict[str, Any] = {}
    for name, value in by_dotted_name.items():
        if value is None:
            continue
        table = tables
        *path, last = name.split(".")
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def flat(tables: SettingsTable, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What is no table, or an empty one, under dotted names; lists stay whole."""
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def merge_tables(base: SettingsTable, override: SettingsTable) -> dict[str, Any]:
    """`base` with `override` laid over it, table by table."""
    result = dict(base)
    for key, value in override.items():
        base_table = result.get(key)
        result[key] = (
            merge_tables(base_table, value) if isinstance(base_table, Mapping) and isinstance(value, Mapping) else value
        )
    return result


def differences(first: SettingsTable, second: SettingsTable, absent: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """The dotted names under which two tables hold other values, and both; `absent` stands for one that is missing."""
    for name in {**first, **second}:
        tables = first.get(name, {}), second.get(name, {})
        if all(isinstance(table, Mapping) for table in tables):
            yield from ((f"{name}.{name_below}", old, new) for name_below, old, new in differences(*tables, absent))
        elif first.get(name, absent) != second.get(name, absent):
            yield name, first.get(name, absent), second.get(name, absent)
