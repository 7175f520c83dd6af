"""Logs of texts: recognised, their prompts read once each, and refused as rollouts with the reason."""

import json
from pathlib import Path

import pytest

from mismatch_probe.config.model import PromptSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.logs import Holds, recognise
from mismatch_probe.tasks import load_prompts

DATA = Path(__file__).parent / "data"
HAND_WRITTEN = {
    "areal": [
        {"task_id": 7, "sample_idx": sample, "seqlen": 9, "prompt_len": 4, "head_version": 3, "tail_version": 3}
        | {"reward": 0.5, "prompt": "1+1=", "completion": "2"}
        for sample in range(2)
    ],
    "roll": [
        {"id": ["a", "b"], "prompt": ["1+1=", "1+2="], "responses": ["2", "3"], "scores": [1.0, 1.0]}
        | {"global_step": [3, 3], "sampling_params": ["{}", "{}"]}
    ],
    "rllm": [{"id": "q:0", "task": {"question": "1+1="}, "trajectories": [], "is_correct": True}],
}


def written(name: str, folder: Path) -> Path:
    if name not in HAND_WRITTEN:
        return DATA / name
    indent = 2 if name == "rllm" else None
    path = folder / "log"
    path.write_text("".join(json.dumps(line, indent=indent) + "\n" for line in HAND_WRITTEN[name]))
    return path


@pytest.mark.parametrize("name", ["trl", "verl_text", *HAND_WRITTEN])
def test_a_log_of_texts_gives_its_prompts_and_says_why_nothing_else(name, tmp_path):
    path = written(name, tmp_path)
    known = recognise(path)
    assert (known.name, known.holds) == (name, Holds.PROMPTS)
    rows = list(known.read_prompts(path, pytest.fail))
    assert len(rows) == {"trl": 2, "verl_text": 2, "roll": 2}.get(name, 1)
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
