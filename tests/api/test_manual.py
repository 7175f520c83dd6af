"""The examples of docs/api.md run, the notebook's cells run, and docs/adapters.md says what each adapter can do."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.dtypes import Dtype
from scripts.notebook import NOTEBOOK, with_outputs
from tests.docs.test_reports import OF_A_MACHINE
from tests.simulated_run import Simulation, simulated_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("runs") / "run"
    pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))
    return str(simulated_run(path, Simulation(num_prompts=8, pairs=pairs), with_summary=True).path)


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:guards that are off")
def test_every_example_of_the_manual_runs(run: str) -> None:
    namespace: dict[str, Any] = {"RUN": run}
    examples = blocks("api.md")
    for number, example in enumerate(examples, start=1):
        exec(compile(example, f"docs/api.md, example {number}", "exec"), namespace)
    assert len(examples) >= 7
    assert namespace["tested"].as_given == ()


@pytest.mark.slow
def test_the_notebook_holds_what_its_cells_print() -> None:
    """Where it does not: python scripts/notebook.py."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert with_outputs(notebook) == notebook
    printed = ["".join(output["text"]) for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert "temperature" in printed[-1]
    assert max(len(line) for text in printed for line in text.splitlines()) <= 120
    assert not OF_A_MACHINE.search("".join(printed))


@pytest.mark.parametrize("trainer", ["TRL", "verl", "slime", "SkyRL"])
def test_the_table_of_adapters_says_what_each_can_do(trainer: str) -> None:
    table = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    row = next(line for line in table.splitlines() if line.startswith(f"| {trainer}"))
    source = (ROOT / "mismatch_probe" / "adapters" / f"{trainer.lower()}.py").read_text(encoding="utf-8")
    assigned = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "CAN"
    )
    assert assigned is not None
    assert row.split("|")[3].strip() == ", ".join(ast.literal_eval(assigned))


def test_the_modules_that_the_manual_names_are_there() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    named = set(re.findall(r"mismatch_probe\.adapters\.(\w+)(?: import |\.)(\w+)", text))
    assert {module for module, _ in named} == {"trl", "slime", "miles", "skyrl"}
    for module, name in named:
        source = (ROOT / "mismatch_probe" / "adapters" / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", source, flags=re.MULTILINE), (module, name)
