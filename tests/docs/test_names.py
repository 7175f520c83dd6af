"""Names in the documents are names of the code: what was renamed or removed is not described any more."""

import re
from functools import cache

import pytest

from mismatch_probe.errors import ExitCode
from tests.docs.pages import ROOT, Page, pages

_NAME = re.compile(r"\b\w*[A-Za-z]\w*_\w+")
_CODE = (".py", ".pyi", ".js", ".j2", ".toml", ".json")

OF_OTHERS = {
    "NeMo-RL": {
        "should_log_nemo_gym_responses",
        "loss_fn",
        "force_on_policy_ratio",
        "seq_logprob_error_threshold",
    },
    "prime-rl": {"enable_token_export"},
    "SkyRL": {
        "dump_data_batch",
        "rollout_train_logprobs_abs_diff_mean",
        "minibatch_rollout_logprobs_abs_diff_mean",
        "minibatch_rollout_logprobs_abs_diff_sq_mean",
    },
    "verl": {"dump_dir", "VERL_USE_EXTERNAL_PLUGINS", "optimizer_step"},
    "open-instruct": {"rollouts_save_path"},
    "TRL": {"log_completions"},
    "transformers": {"vision_model"},
    "AReaL": {"dump_to_file"},
    "PyTorch": {
        "_is_avx512_bf16_supported",
        "_is_amx_fp16_supported",
        "_is_vnni_supported",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    },
    "vLLM": {
        "_C_AVX2",
        "_C_AVX512",
        "qkv_proj",
        "gate_up_proj",
        "api_server",
        "VLLM_SERVER_DEV_MODE",
        "node_rank",
        "master_addr",
    },
    "SGLang": {"launch_server", "return_meta_info"},
    "OpenSSL": {"SSL_CERT_FILE"},
    "Ray": {"RAY_ADDRESS"},
    "a row's id": {"PROMPT_ID"},
}
"""Names that are not the code's, by whose they are."""


@cache
def names_of_code() -> set[str]:
    files = [path for path in (ROOT / "mismatch_probe").rglob("*") if path.suffix in _CODE]
    text = "\n".join(path.read_text(encoding="utf-8") for path in (*files, ROOT / "pyproject.toml"))
    folders = {path.stem for folder in ("benchmarks", "tests", "examples") for path in (ROOT / folder).rglob("*")}
    return set(re.findall(r"\w+", text)) | folders


def unknown_names(page: Page) -> set[str]:
    named = {name for code in page.code_in_prose for name in _NAME.findall(code)}
    known = names_of_code().union(*OF_OTHERS.values())
    return {name for name in named if name not in known and name.lstrip("_") not in known}


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_name_is_the_codes_or_listed_as_anothers(page: Page) -> None:
    assert unknown_names(page) == set()


def test_a_name_that_the_code_has_not_is_seen() -> None:
    assert unknown_names(Page(ROOT / "README.md", "the metric `kl_k4` and the flag `no_such_setting = 1`")) == {
        "kl_k4",
        "no_such_setting",
    }


def test_no_name_is_listed_in_vain() -> None:
    named = {name for page in pages() for code in page.code_in_prose for name in _NAME.findall(code)}
    assert set().union(*OF_OTHERS.values()) - named == set()


def test_every_exit_code_has_its_row() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)] == sorted(ExitCode)
