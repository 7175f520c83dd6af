"""From flags to the nested settings that a configuration file would hold."""

from collections.abc import Mapping
from typing import Any


def nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """`{"model.path": "x"}` as `{"model": {"path": "x"}}`; flags that were not given (None) are left out."""
    tables: dict[str, Any] = {}
    for dotted, value in flags.items():
        if value is None:
            continue
        table = tables
        *path, last = dotted.split(".")
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return tables
