"""Names in the code are the words that docs/contributing.md asks for, in the rooms that have been gone through."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import mismatch_probe

pytestmark = pytest.mark.slow

PACKAGE = Path(mismatch_probe.__file__).parent
ROOMS = ("api", "compare", "gate", "importing", "stats", "train", "training_path")
NEVER_ALONE = {
    *("again", "apart", "asked", "behind", "beside", "everywhere", "found", "given", "here", "known", "left", "mended"),
    *("one", "said", "seen", "there", "told", "wanted", "whole", "written"),
}
COMMONEST = {
    *("apart", "asked", "behind", "beside", "found", "given", "known", "left", "mended", "one", "said", "there"),
    *("told", "whole"),
}
TO_COME = {("records/summary.py", "beside")}
"""What an exception's text is called, and a field of `summary.json`."""
SHARED = {"_repr_html_", "_on_every_rank", "_finish", "_add"}
"""Private names of a protocol, of two classes with one interface, or of two methods of sibling classes."""


def sources(room: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        if "cost" not in path.parts:
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def names_of_things(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_is_a_participle_or_an_adverb_alone(room: str) -> None:
    bad = {
        f"{path}: {name}"
        for path, tree in sources(room)
        for name in names_of_things(tree)
        if name.strip("_") in NEVER_ALONE
    }
    assert not bad


def test_the_commonest_of_these_words_name_nothing_in_any_room() -> None:
    names = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in names_of_things(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_") in COMMONEST
    }
    assert names == TO_COME


@pytest.mark.parametrize("room", ROOMS)
def test_a_private_helper_has_a_name_that_is_found_once_in_its_room(room: str) -> None:
    counts = Counter(
        node.name
        for _, tree in sources(room)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.name.startswith("_")
        and not node.name.startswith("__")
    )
    assert {name for name, count in counts.items() if count > 1} <= SHARED


def test_no_class_name_of_these_rooms_stands_for_two_things() -> None:
    owners: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: paths for name, paths in owners.items() if len(paths) > 1}
    assert not {name: paths for name, paths in twice.items() if any(path.split("/")[0] in ROOMS for path in paths)}


def test_the_check_sees_such_a_name() -> None:
    assert "told" in set(names_of_things(ast.parse("def f(told):\n    pass")))
    assert {"there", "_left"} <= set(names_of_things(ast.parse("there = 1\nself._left = 2")))
