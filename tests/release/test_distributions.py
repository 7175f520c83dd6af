"""The wheel and the source distribution: what is in them, and that the commands run from an installed wheel."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from mismatch_probe import __version__
from mismatch_probe.errors import ExitCode
from tests.importing.logs import rows, write
from tests.simulated_run import Simulation, simulated_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"
USER = """
import numpy as np
import mismatch_probe as mp

comparison = mp.compare_logprobs(np.zeros((1, 2)), np.zeros((1, 2)), mask=True)
reveal_type(comparison)
reveal_type(comparison.verdict.kind)
mp.Guards.default(can=3)
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from a copy of the sources, without a network."""
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("distributions")
    shutil.copytree(ROOT / "mismatch_probe", sources / "mismatch_probe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "tests" / "release", sources / "tests")
    for kind in ("sdist", "wheel"):
        subprocess.run([sys.executable, "-c", BUILD, kind, str(built)], cwd=sources, check=True, capture_output=True)
    return built


@pytest.fixture(scope="module")
def site(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is installed, without its dependencies: those of the tests are used."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    words = [*install, "--no-deps", "--no-index", "--target", str(site), str(_wheel(distributions))]
    subprocess.run(words, check=True)
    return site


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(distributions: Path) -> None:
    package = ROOT / "mismatch_probe"
    files = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    expected = {file for file in files if "__pycache__" not in file}
    with zipfile.ZipFile(_wheel(distributions)) as wheel:
        names = set(wheel.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"mismatch_probe/py.typed", "mismatch_probe/__init__.pyi"} <= names


def test_the_source_distribution_has_the_package_and_no_part_of_the_tests(distributions: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "mismatch_probe/demo_checkpoint/model.safetensors"} <= names
    assert not any(name.startswith("tests") for name in names)


def test_the_metadata_name_version_licence_subjects_and_extras(distributions: Path) -> None:
    metadata = _metadata(distributions)
    assert (metadata["Name"], metadata["Version"]) == ("mismatch-probe", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "vllm" in (metadata["Keywords"] or "")
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert {"vllm-cpu", "vllm-cuda", "training", "server"} <= set(metadata.get_all("Provides-Extra") or [])


def test_commands_run_from_the_installed_wheel(site: Path, tmp_path: Path) -> None:
    simulated_run(tmp_path / "run", Simulation(num_prompts=4), with_summary=True)
    (tmp_path / "gate.toml").write_text('[[gate.check]]\nmetric = "kl_k3"\nmax = 1.0\nclip = 5\n')
    write(tmp_path / "log.jsonl", rows(8))
    for words, code in {
        ("--help",): ExitCode.PASS,
        ("report", "run"): ExitCode.PASS,
        ("gate", "run", "--config", "gate.toml", "--json"): ExitCode.INCONCLUSIVE,
        ("import", "log.jsonl", "--out", "imported"): ExitCode.PASS,
        ("init", "compare"): ExitCode.PASS,
    }.items():
        ended = _run(("-m", "mismatch_probe", *words), site, tmp_path)
        assert ended.returncode == code, f"{words}: {ended.stderr}"
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "imported" / "summary.json").exists()


def test_the_api_is_loaded_from_the_installed_wheel(site: Path, tmp_path: Path) -> None:
    code = "import mismatch_probe as mp; print(mp.__file__); print(len(mp.Guards.default().explain().rows))"
    ended = _run(("-c", code), site, tmp_path)
    place, guards = ended.stdout.splitlines()
    assert Path(place).parent.parent == site
    assert int(guards) > 0


def test_a_type_checker_knows_the_api_from_the_installed_wheel(site: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    ended = _run(("-m", "mypy", "--no-incremental", "user.py"), site, tmp_path, MYPYPATH=str(site))
    assert 'Revealed type is "mismatch_probe.api.comparison.Comparison"' in ended.stdout, ended.stdout
    assert 'incompatible type "int"' in ended.stdout
    assert "Any" not in ended.stdout


def _wheel(distributions: Path) -> Path:
    [wheel] = distributions.glob("*.whl")
    return wheel


def _metadata(distributions: Path) -> Message:
    with zipfile.ZipFile(_wheel(distributions)) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(wheel.read(name).decode())


def _run(words: tuple[str, ...], site: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(site), **environment}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
