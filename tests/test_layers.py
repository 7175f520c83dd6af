"""The shape of the package: no import goes round in a circle, and the table of rooms says what is enforced."""

import re
import tomllib
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from grimp import build_graph

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_no_import_goes_round_in_a_circle() -> None:
    """Imports inside functions and for annotations count too."""
    graph = build_graph("mismatch_probe", cache_dir=None)
    assert circle({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}) == []


@pytest.mark.parametrize(
    ("imports", "found"), [({"a": {"b"}, "b": {"c"}}, []), ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, ["a", "b", "c"])]
)
def test_a_circle_is_seen(imports: dict[str, set[str]], found: list[str]) -> None:
    assert sorted(set(circle(imports))) == found


def test_the_table_of_rooms_is_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    enforced = [{room.strip().removeprefix("mismatch_probe.") for room in layer.split("|")} for layer in layers]
    assert rooms_by_layer((ROOT / "docs" / "architecture.md").read_text()) == dict(enumerate(reversed(enforced), 1))


def test_every_room_is_in_the_contract() -> None:
    rooms = {path.stem for path in (ROOT / "mismatch_probe").iterdir() if path.suffix == ".py" or holds_code(path)}
    documented = rooms_by_layer((ROOT / "docs" / "architecture.md").read_text())
    assert rooms - {"__init__", "__main__"} == set().union(*documented.values())


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other round in a circle; none where there is no such circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def rooms_by_layer(table: str) -> dict[int, set[str]]:
    rooms = defaultdict(set)
    for layer, names in re.findall(r"^\| (\d+) \| ([^|]+) \|", table, flags=re.MULTILINE):
        rooms[int(layer)] |= set(re.findall(r"`(\w+)`", names))
    return dict(rooms)


def holds_code(path: Path) -> bool:
    return (path / "__init__.py").exists()
