"""What a server was found to do, as the page says it."""

from typing import Any

import pytest

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.report.sections.provenance import server_tables
from tests.simulated_run import Simulation, simulated_manifest

APPLIED: dict[str, Any] = {
    "software": "vLLM 0.32.0",
    "url": "http://host",
    "protocol": "/v1/completions",
    "model": "policy",
    "model_root": "<b>ckpt</b>",
    "max_model_len": 512,
    "dtype": "bf16",
    "dtype_known_from": "the server",
    "weight_version": "default",
    "weights_are_labelled": False,
    "prefill": False,
    "asked": {
        "echoes_prompt_ids": True, "log_probs": "before temperature", "again": 0.0, "in_a_crowd": 0.02,
        "behind_the_cache": None, "same_tokens": False, "refuses_unknown_ids": None, "sampled_as_said": 0.25,
    },
}  # fmt: skip


def manifest(applied: dict[str, Any]) -> Manifest:
    simulated = simulated_manifest(Simulation(num_prompts=2))
    values = {
        **simulated.settings.model_dump(mode="json"),
        "infer": [{"name": "prod", "url": "http://host"}],
        "pairs": [("bf16", "prod")],
    }
    settings = CompareSettings.model_validate(values)
    return simulated.model_copy(
        update={"settings": settings, "stages": {"sample-prod": StageRecord(effective_settings=applied)}}
    )


def test_each_question_has_its_answer_in_words() -> None:
    [table] = server_tables(manifest(APPLIED))
    assert table.caption == "prod: what the server was found to do"
    answers = {str(question): str(answer) for question, answer in table.rows}
    assert answers["software"] == "vLLM 0.32.0, asked at http://host/v1/completions"
    assert answers["servers at this address"] == "is not known"
    assert answers["label of its weights"] == "none (default)"
    assert answers["the same request again"] == "the same bits"
    assert answers["the same among others"] == "log-probs move by up to 0.0200 nats"
    assert answers["the same with its prompt cached"] == "is not known"
    assert answers["refuses ids that the checkpoint lacks"] == "is not known"
    assert answers["one seed gives the same tokens"] == "no"
    assert answers["tokens are drawn as its log-probs say"] == "p = 0.250"
    assert answers["prompt log-probs"] == "not asked for"
    assert "<b>" not in answers["model"]


@pytest.mark.parametrize("applied", [{}, {"asked": "nothing"}])
def test_a_server_that_nothing_is_known_of_has_no_table(applied: dict[str, Any]) -> None:
    assert server_tables(manifest(applied)) == []


def test_an_engine_here_has_no_table() -> None:
    assert server_tables(simulated_manifest(Simulation(num_prompts=2))) == []
