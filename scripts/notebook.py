"""Runs the cells of examples/guards.ipynb and puts what they print into the notebook: python scripts/notebook.py

What a cell warns of stands there without the file that it came from. The same code gives the same notebook.
"""

import json
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "guards.ipynb"


def with_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its code cells, which run one after the other in one namespace."""
    namespace: dict[str, Any] = {}
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell = cell | {"execution_count": number, "outputs": outputs_of("".join(cell["source"]), number, namespace)}
        cells.append(cell)
    return notebook | {"cells": cells}


def outputs_of(source: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """The streams that a cell writes, as a notebook holds them."""
    printed = StringIO()
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed):
        warnings.simplefilter("always")
        exec(compile(source, f"cell {number}", "exec"), namespace)
    warned = "".join(f"{each.category.__name__}: {each.message}\n" for each in caught)
    streams = {"stderr": warned, "stdout": printed.getvalue()}
    return [
        {"name": name, "output_type": "stream", "text": text.splitlines(keepends=True)}
        for name, text in streams.items()
        if text
    ]


def main() -> None:
    notebook = with_outputs(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
