"""What `watch` says of metrics alone: which guards can judge them, the least that KL can be, what contradicts what."""

import os
import time
from pathlib import Path

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.metrics import guard_metrics
from mismatch_probe.logs.metric_names import loop_names
from mismatch_probe.records.lines import WatchRecord
from mismatch_probe.train.trackers import ALIASES
from tests.command_line import probe
from tests.importing.test_curves import log_of as columns_of_noise
from tests.importing.test_watch_metrics import DATA, line
from tests.importing.watching import watched


def test_guards_that_these_metrics_cannot_serve_are_counted_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes((DATA / "prime_rl.log").read_bytes())
    os.utime(path, (time.time() - 3600,) * 2)
    answer, record = watched(path, code=ExitCode.PASS)
    [counted] = [words for words in answer.stderr.splitlines() if "can be judged from these metrics" in words]
    assert counted.startswith(f"{record.num_guards - len(record.guards_off)} of {record.num_guards} guards")
    assert {"mismatch-limit", "mismatch-drift", "entropy-lost"}.isdisjoint(record.guards_off)
    assert record.guards_off["temperature"] == ["mismatch/temperature_fit"]


def test_guards_of_the_loop_judge_what_the_trainer_logs_of_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        line(step, rollout_corr__k3_kl=1e-3, actor__grad_norm=1e-9 if step < 3 else 0.0, actor__pg_loss=0.1)
        for step in range(8)
    ]
    path.write_bytes(b"\n".join(rows) + b"\n")
    os.utime(path, (time.time() - 3600,) * 2)
    _, record = watched(path, code=ExitCode.PASS)
    assert {event["guard"] for step in record.steps for event in step.events} == {"underflow"}


def test_a_guard_file_may_name_a_metric_as_the_trainer_calls_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = (line(step, mine__clipped=0.1 if step < 4 else 0.9, rollout_corr__k3_kl=1e-3) for step in range(6))
    path.write_bytes(b"\n".join(rows) + b"\n")
    os.utime(path, (time.time() - 3600,) * 2)
    guards = tmp_path / "guards.toml"
    guards.write_text(
        'defaults = false\n[[guard]]\nname = "clipped"\nrule = "limit"\nmetric = "mine/clipped"\nabove = 0.5\n'
        'actions = ["stop"]\n'
    )
    _, record = watched(path, "--guards", guards, code=ExitCode.GATE_FAILED)
    assert record.stopped_at == 4


def test_the_least_that_kl_can_be_stands_for_a_kl_that_is_not_logged() -> None:
    """Of log-ratios it is never above k3, and of equal |d| it is k3's own bound."""
    columns = {name: values[0] for name, values in columns_of_noise(0.3, 0, heavy=True).items()}
    slime = {"train/train_rollout_logprob_abs_diff": columns["abs_logprob_diff_seq"]}
    prefix = "policy/rollout_train_logprobs_abs_diff"
    deviation = (columns["logprob_diff_rms"] ** 2 - columns["abs_logprob_diff"] ** 2) ** 0.5
    skyrl = {
        f"{prefix}_mean": columns["abs_logprob_diff"],
        f"{prefix}_std": deviation,
        f"{prefix}_max": columns["abs_logprob_diff_max"],
    }
    for values in (slime, skyrl):
        assert 0.2 * columns["kl_k3"] < guard_metrics(values)["mismatch/kl_k3"] <= columns["kl_k3"]


def test_a_bound_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes((DATA / "skyrl.log").read_bytes())
    os.utime(path, (time.time() - 3600,) * 2)
    answer, record = watched(path, code=ExitCode.PASS)
    assert answer.stderr.count("KL (k3) is not in this log") == 1
    assert "step 1: mean |d| 0.0454, KL (k3) at least 0.00227" in answer.stderr
    assert "mismatch/kl_k3" in record.bounds


CONTRADICTIONS = {
    "k3_below_half_square": {"mismatch__kl_k3": 0.001, "mismatch__logprob_diff_rms": 0.2},
    "chi2_seq_below_zero": {"rollout_corr__k3_kl": 0.001, "rollout_corr__chi2_seq": -0.88},
    "ess_above_weights": {
        "rollout_corr__k3_kl": 0.001,
        "rollout_corr__rollout_is_eff_sample_size": 0.99,
        "rollout_corr__rollout_is_std": 0.9,
        "rollout_corr__rollout_is_mean": 1.0,
        "rollout_corr__rollout_is_ratio_fraction_low": 0.0,
    },
}
HONEST = {
    "k3_below_half_square": {"mismatch__kl_k3": 0.005, "mismatch__logprob_diff_rms": 0.1},
    "chi2_seq_below_zero": {"rollout_corr__k3_kl": 0.001, "rollout_corr__chi2_seq": 0.88},
    "ess_above_weights": {
        "rollout_corr__k3_kl": 0.001,
        "rollout_corr__rollout_is_eff_sample_size": 1 / (1 + 0.9**2),
        "rollout_corr__rollout_is_std": 0.9,
        "rollout_corr__rollout_is_mean": 1.0,
        "rollout_corr__rollout_is_ratio_fraction_low": 0.0,
    },
}


@pytest.mark.parametrize("values", [CONTRADICTIONS, HONEST], ids=["contradicting", "honest"])
@pytest.mark.parametrize("law", CONTRADICTIONS)
def test_a_number_that_contradicts_another_is_said_once(
    tmp_path: Path, law: str, values: dict[str, dict[str, float]]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step, **values[law]) + b"\n" for step in range(30)))
    os.utime(path, (time.time() - 3600,) * 2)
    answer = probe("watch", path, "--idle", 0, "--json")
    record = WatchRecord.model_validate_json(answer.stdout)
    is_broken = values is CONTRADICTIONS
    lines = [words for words in answer.stderr.splitlines() if words.startswith("  contradiction: ")]
    assert len(lines) == is_broken
    assert [contradiction.law for contradiction in record.contradictions] == [law] * is_broken
    is_exact = law == "ess_above_weights"
    assert answer.returncode == (ExitCode.ENVIRONMENT if is_broken and is_exact else ExitCode.PASS)


def test_a_contradiction_at_one_step_is_said_and_changes_no_code(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    law = "ess_above_weights"
    rows = [line(step, **(CONTRADICTIONS if step == 12 else HONEST)[law]) for step in range(30)]
    path.write_bytes(b"\n".join(rows) + b"\n")
    os.utime(path, (time.time() - 3600,) * 2)
    answer, record = watched(path, code=ExitCode.PASS)
    assert answer.stderr.count("  contradiction: ") == 1
    assert record.contradictions[0].first_step == 12


def test_a_text_without_metrics_ends_with_2_and_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("loading the model\n")
    assert "cannot be read" in probe("watch", path, "--idle", 0, code=ExitCode.USAGE).stderr
    answer = probe("watch", path, "--idle", 0, "--format", "metrics", code=ExitCode.INCONCLUSIVE)
    assert "no step could be judged" in answer.stdout


def test_what_is_judged_of_the_loop_is_what_this_tool_sends_under_that_name() -> None:
    sent = {theirs: ours for names in ALIASES.values() for theirs, ours in names.items()}
    assert all(sent.get(theirs, ours) == ours for theirs, ours in loop_names().items())
