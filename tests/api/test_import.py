"""What `import mismatch_probe` costs, and what the names of the API load."""

import subprocess
import sys
from functools import cache

import pytest

import mismatch_probe as mp

HEAVY = ("torch", "transformers", "vllm", "plotly", "typer", "pyarrow", "pandas", "rich", "jinja2")


def third_party(code: str) -> set[str]:
    """The packages besides the standard library that are loaded once `code` has run, in a process that does no more."""
    return {name for name in loaded_by(code) - loaded_by("") - sys.stdlib_module_names if not name.startswith("_")}


@cache
def loaded_by(code: str) -> set[str]:
    program = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}), sep='\\n')"
    answer = subprocess.run([sys.executable, "-c", f"{code}\n{program}"], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_the_import_alone_loads_nothing() -> None:
    assert third_party("import mismatch_probe") == {"mismatch_probe"}


@pytest.mark.slow
def test_guards_load_numbers_and_settings_only() -> None:
    loaded = third_party("import mismatch_probe as mp; mp.Guards, mp.Batch, mp.Sums, mp.Probe, mp.Decision")
    assert not loaded & set(HEAVY)
    assert "mismatch_probe" in loaded


@pytest.mark.slow
def test_a_comparison_loads_neither_an_engine_nor_figures() -> None:
    loaded = third_party("import mismatch_probe as mp; mp.compare_logprobs, mp.Comparison")
    assert not loaded & {"torch", "transformers", "vllm", "plotly", "typer"}


def test_every_name_is_there() -> None:
    assert all(getattr(mp, name) is not None for name in mp.__all__)
    assert set(mp.__all__) <= set(dir(mp))
    with pytest.raises(AttributeError, match="'Guard'"):
        mp.Guard  # noqa: B018
