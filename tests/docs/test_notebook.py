"""The notebook of the examples runs from top to bottom, and its outputs are those of today.

`python -m tests.docs.test_notebook` writes them again.
"""

import ast
import json
import warnings
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest

from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "examples" / "guards.ipynb"


def outputs_of_today(notebook: dict[str, Any]) -> list[dict[str, str]]:
    """What each cell of code writes, by the name of the stream; a last expression is shown as `print` shows it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_streams_of_cell("".join(cell["source"]), names) for cell in cells_of_code(notebook)]


def _streams_of_cell(source: str, names: dict[str, Any]) -> dict[str, str]:
    tree, output = ast.parse(source), StringIO()
    if tree.body and isinstance(expression := tree.body[-1], ast.Expr) and not _is_call_of_print(expression.value):
        tree.body[-1] = ast.parse("print()").body[0]
        assert isinstance(tree.body[-1], ast.Expr)
        assert isinstance(tree.body[-1].value, ast.Call)
        tree.body[-1].value.args.append(expression.value)
        ast.fix_missing_locations(tree)
    with warnings.catch_warnings(record=True) as caught_warnings, redirect_stdout(output):
        warnings.simplefilter("always")
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
    warning_text = "".join(f"{each.category.__name__}: {each.message}\n" for each in caught_warnings)
    return {name: text for name, text in (("stderr", warning_text), ("stdout", output.getvalue())) if text}


def _is_call_of_print(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print"


def cells_of_code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored_outputs(notebook: dict[str, Any]) -> list[dict[str, str]]:
    return [{each["name"]: "".join(each["text"]) for each in cell["outputs"]} for cell in cells_of_code(notebook)]


@pytest.mark.slow
def test_every_cell_runs_in_its_order_and_its_output_is_that_of_today() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    outputs = outputs_of_today(notebook)
    assert stored_outputs(notebook) == outputs, "write them again: python -m tests.docs.test_notebook"
    assert sum(map(bool, outputs)) > 3


def test_a_cell_that_fails_or_writes_something_else_is_seen() -> None:
    def notebook(source: str) -> dict[str, Any]:
        outputs = [{"output_type": "stream", "name": "stdout", "text": ["3\n"]}]
        return {"cells": [{"cell_type": "code", "source": [source], "outputs": outputs}]}

    assert outputs_of_today(notebook("1 + 2")) == stored_outputs(notebook("1 + 2"))
    assert outputs_of_today(notebook("print(1 + 3)")) != stored_outputs(notebook("print(1 + 3)"))
    with pytest.raises(ZeroDivisionError):
        outputs_of_today(notebook("1 / 0"))


if __name__ == "__main__":
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for code_cell, streams in zip(cells_of_code(content), outputs_of_today(content), strict=True):
        code_cell["outputs"] = [
            {"name": name, "output_type": "stream", "text": text.splitlines(keepends=True)}
            for name, text in streams.items()
        ]
    NOTEBOOK.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
