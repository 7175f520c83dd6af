"""What `import mismatch_probe` costs, and what the names of the API load."""

import subprocess
import sys

import pytest

import mismatch_probe as mp

HEAVY = ("torch", "transformers", "vllm", "plotly", "typer", "pyarrow", "pandas", "rich", "jinja2")


def third_party(code: str) -> set[str]:
    """The packages besides the standard library and this one that are loaded once `code` has run."""
    told = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}), sep='\\n')"
    answer = subprocess.run([sys.executable, "-c", f"{code}\n{told}"], capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.split())
    bare = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return {name for name in loaded - set(bare.stdout.split()) - sys.stdlib_module_names if not name.startswith("_")}


def test_the_import_alone_loads_nothing() -> None:
    assert third_party("import mismatch_probe") == {"mismatch_probe"}


@pytest.mark.parametrize("name", ["Guards", "Batch", "Sums", "Probe", "Decision"])
def test_guards_load_numbers_and_settings_only(name: str) -> None:
    loaded = third_party(f"import mismatch_probe as mp; mp.{name}")
    assert not loaded & set(HEAVY)
    assert "mismatch_probe" in loaded


@pytest.mark.parametrize("name", ["compare_logprobs", "Comparison"])
def test_a_comparison_loads_neither_an_engine_nor_figures(name: str) -> None:
    loaded = third_party(f"import mismatch_probe as mp; mp.{name}")
    assert not loaded & {"torch", "transformers", "vllm", "plotly", "typer"}


def test_every_name_is_there() -> None:
    assert all(getattr(mp, name) is not None for name in mp.__all__)
    assert set(mp.__all__) <= set(dir(mp))
    with pytest.raises(AttributeError, match="'Guard'"):
        mp.Guard  # noqa: B018
