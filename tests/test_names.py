"""Names in the code are the words that docs/contributing.md asks for, in the rooms that have been gone through."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
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
ALIAS = re.compile(r"_?[A-Z][a-z]")


def sources(room: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((PACKAGE / room).rglob("*.py")):
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


def named_types(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Each class, with None, and each alias of a type at module level, with its definition; no type variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, None
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value) if ALIAS.match(name):
                if not ast.unparse(value).startswith("TypeVar("):
                    yield name, ast.unparse(value)


def types_with_two_meanings(modules: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """The modules that define a name, where these are two classes, a class and an alias, or two different aliases."""
    owners: dict[str, dict[str, str]] = {}
    for path, tree in modules:
        for number, (name, definition) in enumerate(named_types(tree)):
            owners.setdefault(name, {})[definition or f"a class of {path}, {number}"] = path
    return {name: sorted(places.values()) for name, places in owners.items() if len(places) > 1}


def test_no_name_of_a_class_or_a_type_stands_for_two_things() -> None:
    assert not types_with_two_meanings(sources(""))


@pytest.mark.parametrize(
    ("first", "second"),
    [("class Side: ...", "class Side: ..."), ("class Side: ...", "Side = str"), ("Side = int", "Side = str")],
)
def test_the_check_sees_a_name_of_two_meanings(first: str, second: str) -> None:
    assert types_with_two_meanings([("a.py", ast.parse(first)), ("b.py", ast.parse(second))]) == {
        "Side": ["a.py", "b.py"]
    }


def test_one_type_that_two_modules_name_alike_is_no_second_meaning() -> None:
    alias = "Floats = npt.NDArray[np.float64]"
    assert not types_with_two_meanings([("a.py", ast.parse(alias)), ("b.py", ast.parse(alias))])


def test_the_check_sees_such_a_name() -> None:
    assert "told" in set(names_of_things(ast.parse("def f(told):\n    pass")))
    assert {"there", "_left"} <= set(names_of_things(ast.parse("there = 1\nself._left = 2")))
