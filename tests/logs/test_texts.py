"""Logs of texts: recognised, their prompts read once each, and refused as rollouts with the reason."""

import json
from pathlib import Path

import pytest

from mismatch_probe.config.model import PromptSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.logs import Holds, recognise
from mismatch_probe.tasks import load_prompts

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["trl", "verl_text", "areal", "roll", "rllm_text"])
def test_a_log_of_texts_gives_its_prompts_and_says_why_nothing_else(name, tmp_path):
    path = DATA / name
    known = recognise(path)
    assert (known.name, known.holds) == (name, Holds.PROMPTS)
    rows = list(known.read_prompts(path, pytest.fail))
    assert len(rows) == {"trl": 2, "verl_text": 2}.get(name, 4)
    with pytest.raises(UsageError, match=r"prompts only can be used: it has .*no log-probs"):
        next(known.read(path, pytest.fail))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(load_prompts(PromptSettings(source=str(prompts), num_prompts=len(rows)))) == len(rows)


def test_a_log_of_rollouts_has_no_texts():
    path = DATA / "nemo_rl"
    with pytest.raises(UsageError, match="has no texts of prompts"):
        next(recognise(path).read_prompts(path, pytest.fail))


def test_a_prompt_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps({"input": 3, "output": "", "score": 0, "step": 1, "gts": None}) + "\n")
    with pytest.raises(UsageError, match=r"line 1 of .*neither a text nor messages"):
        list(recognise(path).read_prompts(path, pytest.fail))


def test_a_saved_episode_of_rllm_without_ids_gives_its_prompt(tmp_path):
    episode = json.loads(next(DATA.glob("rllm/**/*.json")).read_text())
    for step in episode["trajectories"][0]["steps"]:
        step |= {"prompt_ids": [], "response_ids": [], "logprobs": []}
    path = tmp_path / "episode.json"
    path.write_text(json.dumps(episode, indent=2))
    known = recognise(path)
    assert known.name == "rllm_text"
    assert list(known.read_prompts(path, pytest.fail)) == [{"prompt": episode["task"]["question"]}]
