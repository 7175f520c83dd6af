"""The wheel holds every file of the package, those that are not Python too."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def wheel_of(source: Path) -> set[str]:
    """The names in the wheel that is built of a copy of this repository."""
    built = source / "built"
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, check=True, capture_output=True)
    [path] = built.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "mismatch_probe", tmp_path / "mismatch_probe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def files_of(source: Path) -> set[str]:
    return {str(path.relative_to(source)) for path in (source / "mismatch_probe").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(source: Path) -> None:
    wheel = wheel_of(source)
    assert "mismatch_probe/guards/defaults.toml" in wheel
    assert files_of(source) - wheel == set()


@pytest.mark.slow
def test_data_that_no_pattern_names_is_seen(source: Path) -> None:
    settings = source / "pyproject.toml"
    settings.write_text(settings.read_text(encoding="utf-8").replace(', "guards/*.toml"', ""), encoding="utf-8")
    assert files_of(source) - wheel_of(source) == {"mismatch_probe/guards/defaults.toml"}
