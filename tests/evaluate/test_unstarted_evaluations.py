"""An evaluation that cannot start leaves nothing behind; what was sampled stays."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.cli.evaluate_command import run_evaluate
from mismatch_probe.errors import UsageError
from mismatch_probe.records.evaluation import EvaluationDirectory

FLAGS = {
    "model": {"path": "demo"},
    "prompts": {"source": "sums:easy", "num_prompts": 4},
    "pairs": [["fp32", "fp32"]],
    "sampling": {"max_new_tokens": 8},
}


def evaluate(out: Path) -> None:
    run_evaluate(FLAGS, config=None, out=out, resume=False, json_output=False)


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_refused_leaves_no_run_but_what_was_sampled(
    sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: EvaluationDirectory, *_: Any) -> None:
        if sampled:
            run.rollouts_path.touch()
        raise UsageError("vLLM knows no such argument")

    monkeypatch.setattr("mismatch_probe.cli.evaluate_command.execute_evaluation", refuse)
    with pytest.raises(UsageError, match="no such argument"):
        evaluate(tmp_path / "run")
    assert (tmp_path / "run").exists() == sampled
