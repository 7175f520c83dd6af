"""What `doctor` finds, where the environment is broken."""

from pathlib import Path

import pytest

from mismatch_probe.compare import examination
from mismatch_probe.compare.examination import examine
from mismatch_probe.errors import INSTALL_ENGINES, ExitCode, UsageError

pytestmark = pytest.mark.slow


def stand_in_for_engines(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    for package in ("torch", "transformers", "vllm"):
        (folder / f"{package}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_packages_that_do_not_import_are_named_with_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "transformers.py").write_text("raise ImportError('operator torchvision::nms does not exist')")
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    examination = examine(None, "bf16")
    assert [(tried.ok, tried.problem) for tried in examination.imports] == [
        (False, "it ended with -9"),
        (False, "ImportError: operator torchvision::nms does not exist"),
        (True, ""),
    ]
    assert examination.exit_code == ExitCode.ENVIRONMENT


def test_packages_that_import_share_one_interpreter_and_one_behind_a_failure_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "import os; open({!r}, 'a').write(f'{{os.getpid()}}\\n'); print('noise')\n".format(str(tmp_path / "said"))
    stand_in_for_engines(tmp_path, monkeypatch, says)
    assert all(tried.ok for tried in examine(None, "bf16").imports)
    (tmp_path / "transformers.py").write_text(says + "raise OSError('cut off')")
    assert [tried.problem for tried in examine(None, "bf16").imports] == ["", "OSError: cut off", ""]
    first, *others = (tmp_path / "said").read_text().split()
    assert others[:2] == [first] * 2
    assert (others[2] == others[3], others[3] == others[4]) == (True, False)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("True True", "no GPU: both sides run on the CPU, whose own FP16 products passed a trial"),
        ("True False", "no GPU: both sides run on the CPU, whose own FP16 products passed a trial"),
        ("False True", "no GPU: both sides run on the CPU, which has no FP16 products that pass a trial"),
        ("False False", "no GPU: both sides run on the CPU, which has no BF16 products and no FP16 products that pass"),
        ("", "no GPU: both sides run on the CPU"),
    ],
)
def test_what_is_said_of_16_bit_products_is_what_a_trial_came_to(
    monkeypatch: pytest.MonkeyPatch, made: str, words: str
) -> None:
    monkeypatch.setattr(examination, "_import_results", lambda packages: ([], made))
    monkeypatch.setattr(examination.environment, "hardware", lambda: {"gpus": []})
    remark = examine(None, "bf16").remarks[-1]
    assert remark.startswith(words)
    assert (remark == words) == (not made)
    assert ("BF16" in remark) == made.endswith("False")


@pytest.mark.parametrize(("dtype", "shown"), [("fp32", set()), ("fp16", {"fp16"}), ("bf16", {"bf16"})])
def test_of_16_bit_products_those_that_are_computed_are_shown(dtype: str, shown: set[str]) -> None:
    settings = {"dtype": dtype, "fp16_products": "native", "bf16_products": "native"}
    assert set(examination._without_unused_facts(settings)) == {"dtype", *(f"{name}_products" for name in shown)}


def test_the_trial_of_products_is_made_where_torch_is_imported() -> None:
    from mismatch_probe.training_path.arithmetic import has_native_bf16, native_fp16_follows_the_definition

    native = f"{native_fp16_follows_the_definition()} {has_native_bf16()}"
    assert examination._import_results(["torch"])[1] == native


def test_an_import_that_does_not_end_is_told_from_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_engines(tmp_path, monkeypatch, "import time; time.sleep(0 if __name__ == 'vllm' else 600)")
    monkeypatch.setattr(examination, "_IMPORT_SECONDS", 1)
    found = examine(None, "bf16")
    assert [tried.ok for tried in found.imports] == [False, False, True]
    assert found.imports[0].problem.startswith("still importing after 1 s: it hangs, or the machine is very busy")
    assert found.exit_code == ExitCode.ENVIRONMENT


def test_a_dtype_that_is_none_is_refused_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_import_results", pytest.fail)
    with pytest.raises(UsageError, match="dtype 'float12' cannot be used"):
        examine("demo", "float12")


def test_engines_that_are_not_installed_come_with_what_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_engines(tmp_path, monkeypatch, "")
    assert not any(INSTALL_ENGINES in remark for remark in examine(None, "bf16").remarks)
    versions = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.19.0"}
    monkeypatch.setattr(examination.environment, "versions", lambda: versions)
    assert f"vllm is not installed: run {INSTALL_ENGINES}" in examine(None, "bf16").remarks
    del versions["torch"]
    assert f"torch, vllm are not installed: run {INSTALL_ENGINES}" in examine(None, "bf16").remarks
