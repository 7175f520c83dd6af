"""The wheel and the source distribution: what is in them, and that a wheel works in an environment of its own.

With `DIST` both are built into that folder, as `make release-check` does, so that what is tried is what is released.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from mismatch_probe import __version__
from mismatch_probe.errors import ExitCode
from tests.docs.pages import DOCS, Page
from tests.importing.logs import rows, write
from tests.release.installs import EXTRAS, MEGABYTE, ROOT, CleanEnvironment, declared, installed, sizes
from tests.simulated_run import Simulation, simulated_run

pytestmark = pytest.mark.slow

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"
ADDRESS = "https://code.example/someone/mismatch-probe"
USER = """
from collections.abc import Mapping

import numpy as np
import mismatch_probe as mp


class Tensor:  # as PyTorch's, which takes half a minute to check
    def detach(self) -> "Tensor":
        return self


rows = [[-1.0, -2.0], [-0.5]]
comparison = mp.compare_logprobs(np.zeros((1, 2)), np.zeros((1, 2)), mask=True, prompt_ids=["a"])
mp.compare_logprobs(rows, [np.zeros(2), np.zeros(1)], entropy=[[0.1, 0.3], [0.2]], prompt_ids=[[1, 2], [3]])
mp.compare_logprobs(Tensor(), [Tensor()], Tensor())
reveal_type(comparison)
reveal_type(comparison.verdict.kind)
reveal_type(comparison.metrics["kl_k3"].low)
reveal_type(comparison.length_budget)
guards = mp.Guards.default(can={"skip", "stop"})
decision = guards.observe(mp.Batch(rows, rows, rewards=[1.0, 0.0], truncated=np.zeros(2)), loss=0.1)
reveal_type(decision.skip)
reveal_type(decision.metrics["mismatch/kl_k3"])
metrics: Mapping[str, float] = decision.metrics
"""
MISTAKES = {
    "mp.Guards.default(can=3)": 'incompatible type "int"',
    'mp.compare_logprobs("log_pi", [[-1.0]])': 'incompatible type "str"',
    'mp.compare_logprobs({"log_pi": [-1.0]}, [[-1.0]])': 'incompatible type "dict[str, list[float]]"',
    "mp.Batch(log_pi=3)": 'incompatible type "int"',
    "mp.Probe(log_mu=[-1.0])": 'Missing positional argument "log_pi"',
    "guards.observe(loss=[0.1])": 'incompatible type "list[float]"',
    "decision.skp": 'has no attribute "skp"',
}

UNSEEN = "rich.*,httpx2.*,email_validator.*,jinja2.*,filelock.*,yaml.*,dns.*,anyio.*"
"""Packages whose types reach no name of the API: mypy takes a sixth less time without them."""


def build(kind: str, sources: Path, into: Path) -> None:
    """Without a network: the build backend of this environment, and no environment of its own."""
    subprocess.run([sys.executable, "-c", BUILD, kind, str(into)], cwd=sources, check=True, capture_output=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, with a folder of tests beside the package."""
    sources = tmp_path_factory.mktemp("sources")
    shutil.copytree(ROOT / "mismatch_probe", sources / "mismatch_probe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "tests" / "release", sources / "tests")
    return sources


@pytest.fixture(scope="module")
def distributions(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both."""
    built = Path(os.environ.get("DIST") or tmp_path_factory.mktemp("distributions"))
    built.mkdir(exist_ok=True)
    for kind in ("sdist", "wheel"):
        build(kind, sources, built)
    return built


@pytest.fixture(scope="module")
def environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    return CleanEnvironment.make(tmp_path_factory.mktemp("environment"), wheel_in(distributions))


def wheel_in(folder: Path) -> Path:
    [wheel] = folder.glob("*.whl")
    return wheel


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(files.read(name).decode())


def run(*words: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Nothing of this repository is on the path of what runs."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = list(map(str, words))
    return subprocess.run(command, cwd=folder, env=outside | variables, capture_output=True, text=True, check=False)


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(distributions: Path) -> None:
    package = ROOT / "mismatch_probe"
    files = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    expected = {file for file in files if "__pycache__" not in file}
    with zipfile.ZipFile(wheel_in(distributions)) as wheel:
        names = set(wheel.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"mismatch_probe/py.typed", "mismatch_probe/__init__.pyi"} <= names


def test_the_source_distribution_has_the_package_and_no_part_of_the_tests(distributions: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {*SOURCES, "mismatch_probe/demo_checkpoint/model.safetensors"} <= names
    assert not any(name.startswith("tests") for name in names)


def test_a_wheel_of_the_source_distribution_is_the_wheel(distributions: Path, tmp_path: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as source:
        source.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    build("wheel", unpacked, tmp_path)
    with zipfile.ZipFile(wheel_in(tmp_path)) as again, zipfile.ZipFile(wheel_in(distributions)) as wheel:
        assert sorted(again.namelist()) == sorted(wheel.namelist())


def test_the_metadata_name_version_licence_subjects_and_extras(distributions: Path) -> None:
    metadata = metadata_of(wheel_in(distributions))
    assert (metadata["Name"], metadata["Version"]) == ("mismatch-probe", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "vllm" in (metadata["Keywords"] or "")
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert {"vllm-cpu", "vllm-cuda", "training", "server"} <= set(metadata.get_all("Provides-Extra") or [])


def test_the_changelog_begins_with_this_version() -> None:
    [heading] = re.findall(r"\A# Changelog\n\n## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", CHANGELOG, re.MULTILINE)
    assert heading == __version__


CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def links(text: str) -> list[str]:
    return re.findall(r"\]\((?!#)([^)\s]+)\)", text)


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_links_of_the_description_are_absolute_once_the_project_has_an_address(
    sources: Path, distributions: Path, tmp_path: Path, address: str
) -> None:
    if address:
        copy = shutil.copytree(sources, tmp_path / "copy")
        with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(f'\n[project.urls]\nRepository = "{address}"\n')
        build("wheel", copy, tmp_path)
    metadata = metadata_of(wheel_in(tmp_path if address else distributions))
    described, readme = str(metadata.get_payload()), (ROOT / "README.md").read_text(encoding="utf-8")
    if not address:
        assert described.strip() == readme.strip()
        return
    assert metadata.get_all("Project-URL") == [f"Repository, {address}"]
    assert f"![The first screen of a report]({address}/raw/v{__version__}/docs/pictures/first-screen.webp)" in described
    assert f"[gate]({address}/blob/v{__version__}/docs/gate.md)" in described
    assert [link for link in links(described) if not link.startswith("https://")] == []
    assert len(links(described)) == len(links(readme))


def test_commands_run_in_an_environment_with_nothing_but_what_the_wheel_declares(
    environment: CleanEnvironment, tmp_path: Path
) -> None:
    simulated_run(tmp_path / "run", Simulation(num_prompts=4), with_summary=True)
    (tmp_path / "gate.toml").write_text('[[gate.check]]\nmetric = "kl_k3"\nmax = 1.0\nclip = 5\n')
    write(tmp_path / "log.jsonl", rows(8))
    for words, code in {
        ("--help",): ExitCode.PASS,
        ("doctor",): ExitCode.ENVIRONMENT,
        ("report", "run"): ExitCode.PASS,
        ("gate", "run", "--config", "gate.toml", "--json"): ExitCode.INCONCLUSIVE,
        ("diff", "run", "run"): ExitCode.PASS,
        ("import", "log.jsonl", "--out", "imported"): ExitCode.PASS,
        ("init", "compare"): ExitCode.PASS,
    }.items():
        ended = run(environment.program, *words, folder=tmp_path)
        assert ended.returncode == code, f"{words}: {ended.stdout}{ended.stderr}"
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "imported" / "summary.json").exists()


def test_what_needs_an_extra_says_which(environment: CleanEnvironment, tmp_path: Path) -> None:
    for command in ("compare", "headroom"):
        ended = run(environment.program, command, "--model", "demo", "--out", command, folder=tmp_path)
        assert ended.returncode == ExitCode.ENVIRONMENT, ended
        assert "pip install 'mismatch-probe[" in ended.stderr
        assert "Traceback" not in ended.stderr
    absent = run(environment.python, "-c", "import torch", folder=tmp_path)
    assert "No module named 'torch'" in absent.stderr


def test_the_api_is_loaded_from_the_installed_wheel(environment: CleanEnvironment, tmp_path: Path) -> None:
    code = (
        "import mismatch_probe as mp; print(mp.__file__); print(len(mp.Guards.default().explain().rows));"
        "print(mp.compare_logprobs([[-1.0, -2.0]] * 9, [[-1.01, -2.02]] * 9).metrics['kl_k3'].num_tokens)"
    )
    ended = run(environment.python, "-c", code, folder=tmp_path)
    assert ended.returncode == 0, ended
    place, guards, tokens = ended.stdout.splitlines()
    assert Path(place).parent.parent == environment.packages
    assert int(guards) > 0
    assert int(tokens) == 18


def test_a_type_checker_knows_the_api_from_the_installed_wheel(environment: CleanEnvironment, tmp_path: Path) -> None:
    num_lines = len(USER.splitlines())
    (tmp_path / "user.py").write_text(USER + "\n".join(MISTAKES) + "\n")
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{UNSEEN}]\nfollow_imports = skip\n")
    path = environment.packages / "mismatch_probe"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mismatch_probe").symlink_to(path)
    words = ("-m", "mypy", "--no-incremental", "--hide-error-context", "--no-error-summary", "user.py")
    ended = run(sys.executable, *words, folder=tmp_path, MYPYPATH=str(tmp_path / "site"))
    lines = [line for line in ended.stdout.splitlines() if line.startswith("user.py:")]
    revealed = re.findall(r'Revealed type is "(.+)"', ended.stdout)
    assert len(revealed) == 6, ended.stdout
    assert revealed[0] == "mismatch_probe.api.comparison.Comparison"
    assert "Any" not in " ".join(revealed)
    errors = {int(line.split(":")[1]): line for line in lines if " error: " in line}
    assert sorted(errors) == list(range(num_lines + 1, num_lines + 1 + len(MISTAKES))), ended.stdout
    for number, mistake in enumerate(MISTAKES.values(), start=num_lines + 1):
        assert mistake in errors[number]


def test_ci_installs_what_its_one_line_says(environment: CleanEnvironment, distributions: Path, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "ci" / "mismatch-probe.txt").read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert line == f"mismatch-probe[vllm-cuda]=={__version__}"
    (tmp_path / "wheels").mkdir()
    shutil.copy(wheel_in(distributions), tmp_path / "wheels")
    local = f"./wheels/{wheel_in(distributions).name}"
    assert f"{local}[vllm-cuda]" in text
    (tmp_path / "mismatch-probe.txt").write_text(f"{tmp_path}/{local}\n")
    again = (
        "install",
        "--dry-run",
        "--no-deps",
        "--force-reinstall",
        "--requirement",
        f"{tmp_path}/mismatch-probe.txt",
    )
    assert f"Would install mismatch-probe-{__version__}" in environment.pip(*again, check=True).stdout


def told_sizes() -> dict[str, int]:
    """Of the table in the documents: megabytes by extra."""
    page = Page.read(DOCS / "first-five-minutes.md").text
    return {
        name.strip("`[]"): int(megabytes.replace(",", ""))
        for name, megabytes in re.findall(r"^\| (none|`\[[\w-]+\]`) \| .+ \| ([\d,]+) MB \|$", page, re.MULTILINE)
    }


def test_the_documents_say_how_large_each_extra_is() -> None:
    measured = {extra or "none": size / MEGABYTE for extra, _, size in sizes()}
    lines = told_sizes()
    assert lines.keys() == measured.keys()
    assert {extra: lines[extra] for extra in lines if abs(lines[extra] - measured[extra]) > 0.1 * measured[extra]} == {}


def test_an_extra_adds_to_what_is_there_without_it() -> None:
    plain = installed(declared())
    assert "torch" not in plain
    assert all(plain.keys() <= installed(declared(extra)).keys() for extra in EXTRAS)
    assert "torch" in installed(declared("training"))
