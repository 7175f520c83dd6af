import shutil
import sys

import pytest

from mismatch_probe.config.model import ModelSettings
from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.tasks import load_tokenizer, resolve_model


def resolve(path: object):
    return resolve_model(ModelSettings(path=str(path)))


def test_demo_is_the_packaged_checkpoint():
    assert resolve("demo") == DEMO_CHECKPOINT
    assert (DEMO_CHECKPOINT / "config.json").is_file()


def test_a_folder_is_itself(tmp_path):
    assert resolve(tmp_path) == tmp_path


def test_a_path_that_is_no_folder_is_refused_without_asking_the_hub(tmp_path):
    with pytest.raises(UsageError, match=r"does not exist.*--model"):
        resolve(tmp_path / "absent")
    with pytest.raises(UsageError, match="does not exist"):
        resolve("./absent")
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UsageError, match="is a file, not a folder"):
        resolve(file)


@pytest.mark.parametrize("path", ["demo", str(DEMO_CHECKPOINT)])
def test_a_revision_of_a_folder_is_refused(path):
    with pytest.raises(UsageError, match="leave --revision out"):
        resolve_model(ModelSettings(path=path, revision="main"))


def test_a_hub_id_that_cannot_be_had_is_one_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="owner/absent is no folder here and cannot be had from the hub") as caught:
        resolve("owner/absent")
    assert "\n" not in str(caught.value)


def test_what_the_hub_met_is_said_without_its_own_opening(monkeypatch):
    def fail(*_, **__):
        raise OSError("Got: ConnectError: no such host\nAn error happened while trying to locate the files")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UsageError, match=r"from the hub \(ConnectError: no such host\); give"):
        resolve("owner/absent")


def test_a_hub_id_without_the_hub_package_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"mismatch-probe\[training\]"):
        resolve("owner/name")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match=r"tokenizer of .* cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "[]"), ("tokenizer_config.json", "[]")])
def test_a_damaged_tokenizer_is_refused(tmp_path, name, content):
    shutil.copytree(DEMO_CHECKPOINT, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer of .* cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_made_up_without_its_vocabulary_is_refused(tmp_path):
    shutil.copytree(DEMO_CHECKPOINT, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UsageError, match="has no vocabulary"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_transformers_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"mismatch-probe\[training\]"):
        load_tokenizer(DEMO_CHECKPOINT)
