"""Records of several turns: NeMo Gym's rollouts and Harbor's results."""

import json

import pytest

from mismatch_probe.errors import UsageError
from tests.logs.reading import read, written
from tests.logs.turns import conversation

MADE = conversation(0)
PROMPTS, COMPLETIONS = (list(part) for part in zip(*MADE, strict=True))
LOG_PROBS = [[-0.5] * len(completion) for completion in COMPLETIONS]


def gym_line(*items: dict) -> dict:
    return {"responses_create_params": {"input": []}, "response": {"output": list(items)}, "_ng_task_index": 3}


def gym_item(prompt: list[int], completion: list[int], log_probs: list[float]) -> dict:
    ids = {"prompt_token_ids": prompt, "generation_token_ids": completion, "generation_log_probs": log_probs}
    return {"type": "message", **ids}


def harbor(path, **details):
    path.write_text(json.dumps({"task_name": "a", "agent_result": {"rollout_details": [details]}}, indent=4))
    return path


def test_a_rollout_of_nemo_gym_has_its_turns(tmp_path):
    items = [gym_item(*turn) for turn in zip(PROMPTS, COMPLETIONS, LOG_PROBS, strict=True)]
    output = [item for turn in items for item in ({"type": "reasoning"}, turn, {"type": "function_call_output"})]
    turns, findings = read(written(tmp_path / "rollouts.jsonl", [gym_line(*output)]))
    assert not findings
    assert [turn.prompt_token_ids.tolist() for turn in turns] == PROMPTS
    assert [turn.token_ids.tolist() for turn in turns] == COMPLETIONS
    assert {turn.trajectory for turn in turns} == {f"line 1 of {tmp_path / 'rollouts.jsonl'}"}
    assert {turn.group for turn in turns} == {"3"}


def test_empty_lists_of_nemo_gym_were_not_recorded(tmp_path):
    output = [gym_item([1], [], []), gym_item([], [2], [-0.5]), gym_item([1], [2], []), gym_item([1], [2], [-0.5])]
    turns, _ = read(written(tmp_path / "rollouts.jsonl", [gym_line(*output)]))
    assert [turn.log_mu is None for turn in turns] == [True, False]


def test_a_result_of_harbor_has_its_turns(tmp_path):
    path = harbor(
        tmp_path / "result.json", prompt_token_ids=PROMPTS, completion_token_ids=COMPLETIONS, logprobs=LOG_PROBS
    )
    turns, _ = read(path)
    assert [turn.prompt_token_ids.tolist() for turn in turns] == PROMPTS
    assert {turn.trajectory for turn in turns} == {str(path)}
    assert all((turn.log_mu == -0.5).all() for turn in turns)
    bare = written(
        tmp_path / "bare.jsonl",
        [{"prompt_token_ids": PROMPTS, "completion_token_ids": COMPLETIONS, "logprobs": LOG_PROBS}],
    )
    assert [turn.token_ids.tolist() for turn in read(bare)[0]] == COMPLETIONS


@pytest.mark.parametrize("log_probs", [[], LOG_PROBS[1:]], ids=["none", "of some turns"])
def test_log_probs_that_cannot_be_paired_were_not_recorded(tmp_path, log_probs):
    path = harbor(
        tmp_path / "result.json", prompt_token_ids=PROMPTS, completion_token_ids=COMPLETIONS, logprobs=log_probs
    )
    assert all(turn.log_mu is None for turn in read(path)[0])


def test_prompts_and_completions_that_cannot_be_paired_are_refused(tmp_path):
    path = harbor(tmp_path / "result.json", prompt_token_ids=PROMPTS[1:], completion_token_ids=COMPLETIONS)
    with pytest.raises(UsageError, match="3 prompts and 4 completions"):
        read(path)


def test_a_result_without_ids_has_no_turn(tmp_path):
    assert read(harbor(tmp_path / "result.json", completion_token_ids=COMPLETIONS))[0] == []
    assert read(harbor(tmp_path / "result.json", prompt_token_ids=[[]], completion_token_ids=[[]]))[0] == []
