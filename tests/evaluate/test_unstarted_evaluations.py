"""An evaluation that cannot start leaves nothing behind; what was sampled stays."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.cli import evaluate
from mismatch_probe.errors import UsageError
from mismatch_probe.records.answers import EvaluationDirectory
from tests.settings_calls import call

FLAGS = {
    "model": {"path": "demo"},
    "prompts": {"source": "sums:easy", "num_prompts": 4},
    "pairs": [["fp32", "fp32"]],
    "sampling": {"max_new_tokens": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_refused_leaves_no_run_but_what_was_sampled(
    sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: EvaluationDirectory, *_: Any) -> None:
        if sampled:
            run.rollouts_path.touch()
        raise UsageError("vLLM knows no such argument")

    monkeypatch.setattr("mismatch_probe.evaluate.run.execute_evaluation", refuse)
    monkeypatch.setattr("mismatch_probe.children.servers.warm_up", lambda *_: None)
    with pytest.raises(UsageError, match="no such argument"):
        call(evaluate.evaluate, FLAGS, out=tmp_path / "run")
    assert (tmp_path / "run").exists() == sampled
