"""`import` of a log of texts: its prompts, each once, and why nothing else."""

import json
from pathlib import Path

from mismatch_probe.config.model import PromptSettings
from mismatch_probe.errors import ExitCode
from mismatch_probe.tasks import load_prompts
from tests.command_line import probe


def log_of_texts(path: Path, *prompts: object) -> Path:
    rows = [{"input": prompt, "output": "4", "gts": "4", "score": 1.0, "step": 3} for prompt in prompts]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_the_prompts_of_a_log_of_texts_are_written_once_each_and_can_be_asked_again(tmp_path: Path) -> None:
    log = log_of_texts(tmp_path / "3.jsonl", "2+2=", "2+2=", "1+3=")
    answer = probe("import", log, "--out", tmp_path / "out", code=ExitCode.INCONCLUSIVE)
    assert "no token ids and no log-probs" in answer.stdout
    assert "Its 2 prompts" in answer.stdout
    source = tmp_path / "out" / "prompts.jsonl"
    assert f"--prompts {source}" in answer.stdout
    prompts = load_prompts(PromptSettings(source=str(source), num_prompts=2))
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("2+2=", "4"), ("1+3=", "4")]


def test_nothing_stays_of_a_log_of_texts_that_cannot_be_read(tmp_path: Path) -> None:
    log = log_of_texts(tmp_path / "3.jsonl", "2+2=", 5)
    answer = probe("import", log, "--out", tmp_path / "out", code=ExitCode.USAGE)
    assert f"line 2 of {log}" in answer.stderr
    assert not (tmp_path / "out").exists()
