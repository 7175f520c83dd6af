"""Names in the code are the words that docs/contributing.md asks for."""

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import mismatch_probe

pytestmark = pytest.mark.slow

PACKAGE = Path(mismatch_probe.__file__).parent
ROOT = Path(__file__).parent.parent
ROOMS = (
    *(
        "ablate",
        "adapters",
        "api",
        "audit",
        "causes",
        "children",
        "cli",
        "compare",
        "config",
        "difference",
        "engines",
        "evaluate",
    ),
    *("explain", "gate", "guards", "headroom", "importing", "localize", "logs", "provenance", "records", "report"),
    *("stats", "tasks", "train", "training_path", "verdict", "*.py"),
)
"""`*.py` are the modules at the top of the package."""
NEVER_ALONE = {
    *("again", "apart", "asked", "behind", "beside", "everywhere", "found", "given", "here", "known", "left", "mended"),
    *("one", "said", "seen", "there", "told", "wanted", "whole", "written"),
}
PARTICIPLES = {
    *("begun", "bought", "broken", "brought", "built", "caught", "chosen", "come", "cut", "dealt", "done"),
    *("drawn", "driven", "fallen", "fed", "felt", "flown", "forgotten", "found", "frozen", "given", "gone"),
    *("got", "grown", "heard", "held", "hidden", "kept", "known", "laid", "learnt", "led", "left", "lent"),
    *("lost", "made", "meant", "met", "paid", "said", "seen", "sent", "shown", "shut", "sold", "spent"),
    *("spoken", "stolen", "stood", "struck", "taken", "taught", "thought", "thrown", "told", "torn"),
    *("understood", "won", "worn", "woken", "written"),
}
ADVERBS = {
    *("above", "after", "again", "ahead", "alone", "already", "always", "anew", "apart", "aside", "away"),
    *("back", "before", "behind", "below", "beside", "besides", "beyond", "down", "else", "elsewhere", "ever"),
    *("everywhere", "far", "here", "just", "late", "later", "near", "never", "now", "often", "once", "out"),
    *("over", "soon", "still", "then", "there", "thus", "together", "too", "twice", "under", "up", "very"),
    *("yet",),
}
NO_PARTICIPLE = re.compile(r"apply|bed|embed|exceed|family|feed|need|only|proceed|red|reply|seed|speed|succeed|tally")
KEPT = {
    *("above", "added", "advised", "after", "alone", "assumed", "before", "below", "beyond", "changed", "clipped"),
    *("compared", "continued", "copied", "corrected", "counted", "cut", "declared", "done", "earned", "examined"),
    *(
        "expected",
        "explained",
        "far",
        "filed",
        "filled",
        "fired",
        "fitted",
        "forgotten",
        "fused",
        "grouped",
        "kept",
        "learnt",
    ),
    *("likely", "logged", "measured", "modified", "moved", "near", "nearly", "out", "over", "padded", "passed"),
    *("planted", "quantized", "raised", "ranked", "reached", "refuted", "removed", "sampled", "scored", "skipped"),
    *("solved", "spent", "stood", "together", "trained", "truncated", "undecided", "unfinished", "unjudged"),
    *("unlikely", "unmatched", "unsupported", "vanished", "verified"),
}
"""Fields of JSON, of saved states and of the public API, names of other libraries, and the counts of totals."""
COMMONEST = {
    *("apart", "asked", "behind", "beside", "found", "given", "known", "left", "mended", "one", "said", "there"),
    *("told", "whole"),
}
IN_TESTS = {"asked", "said", "told", "whole"}
"""What an exception's text is called."""
SHARED = {"_repr_html_", "_on_every_rank", "_finish", "_add"}
"""Private names of a protocol, of two classes with one interface, or of two methods of sibling classes."""
ALIAS = re.compile(r"_?[A-Z][a-z]")


@pytest.fixture(scope="module", autouse=True)
def _uncollected() -> Iterator[None]:
    """Millions of nodes are made and kept: the collector would go through them again and again."""
    gc.disable()
    yield
    parsed.cache_clear()
    names_of_things.cache_clear()
    gc.enable()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(room: str) -> Iterator[tuple[str, ast.Module]]:
    paths = PACKAGE.glob(room) if room == "*.py" else (PACKAGE / room).rglob("*.py")
    for path in sorted(paths):
        yield str(path.relative_to(PACKAGE)), parsed(path)


@cache
def names_of_things(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                names.append(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append(name)
    return names


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
        for name in names_of_things(parsed(path))
        if name.strip("_") in COMMONEST
    }
    assert not names


@pytest.mark.parametrize(("folder", "words"), [("tests", IN_TESTS), ("benchmarks", COMMONEST)])
def test_the_commonest_of_these_words_name_nothing_outside_the_package(folder: str, words: set[str]) -> None:
    names = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / folder).rglob("*.py")
        for name in names_of_things(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_") in words
    }
    assert not names


def is_participle_or_adverb(name: str) -> bool:
    word = name.strip("_")
    if NO_PARTICIPLE.fullmatch(word):
        return False
    return word in PARTICIPLES | ADVERBS or re.fullmatch(r"[a-z]+(ed|ly)", word) is not None


@pytest.mark.parametrize("room", ROOMS)
def test_no_further_name_is_a_participle_or_an_adverb_alone(room: str) -> None:
    bad = {
        f"{path}: {name}"
        for path, tree in sources(room)
        for name in names_of_things(tree)
        if is_participle_or_adverb(name) and name.strip("_") not in KEPT
    }
    assert not bad


def test_every_word_that_is_kept_stands_somewhere() -> None:
    names = {name.strip("_") for room in ROOMS for _, tree in sources(room) for name in names_of_things(tree)}
    assert names >= KEPT


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
    assert all(map(is_participle_or_adverb, ("rounded", "_written", "exactly", "before", "shown")))
    assert not any(map(is_participle_or_adverb, ("seed", "rounded_leg", "is_kept", "state_before", "reply")))
