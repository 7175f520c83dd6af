"""`train` against a real server: its weights change at every step, and whatever goes wrong with them is named."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.train import weight_sync
from tests.command_line import probe
from tests.servers.proxy import GENERATE, Json, Proxy, Reply
from tests.servers.real_server import RealServer, demo_checkpoint
from tests.warm_python import warm_process, warm_python, warm_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:guards that are off here")]

STEPS = 5
SMALL = (
    *("--model", "demo", "--task", "copy:terms=2", "--objective", "pg-seq-is", "--train-dtype", "bf16"),
    *("--learning-rate", "1e-4", "--prompts-per-step", "4", "--samples-per-prompt", "4", "--max-new-tokens", "16"),
)
GUARDS_ON_SYNCS = ("stale-engine", "unsynced-weights", "other-weights", "engine-weights")


def of(url: str, *more: str) -> str:
    return ",".join([f"prod:url={url}", "transfer=gloo", "tries=2", *more])


@pytest.fixture(autouse=True)
def _as_it_was(vllm: RealServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server as it was, after each test; a step asks it for a quarter of the single tokens that others draw."""
    monkeypatch.setattr(weight_sync, "NUM_DRAWS", weight_sync.NUM_DRAWS // 4)
    yield
    vllm.load(demo_checkpoint())
    vllm.label("default")


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    path = out / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_server_is_sent_every_step_s_weights(vllm: RealServer, other_weights: Path, tmp_path: Path) -> None:
    """It begins with other weights, and a run that is resumed goes on after its checkpoint."""
    vllm.load(other_weights)
    out = tmp_path / "run"
    words = ("train", *SMALL, "--infer", of(vllm.url, "prefill=true"), "--checkpoint-every", "2", "--out", out)
    probe(*words, "--steps", 3, code=ExitCode.PASS)
    done = probe(*words, "--steps", STEPS, "--resume", "--json", code=ExitCode.PASS)
    metrics = lines(out, "metrics")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for line in metrics:
        assert line["sync/weights_compared"] == 1.0
        assert line["sync/weights_unchanged"] == line["sync/weights_other"] == 0.0
        assert line["sync/engine_unchanged"] == 0.0
        assert line["mismatch/kl_k3"] < 1e-3, "the floor of BF16"
    assert all(line["update/policy_shift_k3"] > 0 for line in metrics[1:3])
    summary = json.loads(done.stdout)
    assert summary["guards_off"] == {}
    assert not lines(out, "events")
    manifest = json.loads((out / "manifest.json").read_text())
    engine = manifest["effective"]["engine"]
    assert engine["weight_version"].startswith("mismatch-probe-")
    assert engine["says_what_it_holds"] is True


def test_weights_that_do_not_stay_are_seen_and_end_the_run(vllm: RealServer, tmp_path: Path) -> None:
    """From the third update on the server goes back to the checkpoint's, and says nothing of it."""
    updates = [0]

    def undone(path: str, body: Json, reply: Reply) -> Reply:
        labelled = path == "/finish_weight_update" and "weight_version" in body
        updates[0] += labelled
        if labelled and updates[0] > 3:
            vllm.load(demo_checkpoint())
        return reply

    out = tmp_path / "run"
    with Proxy(vllm.url, after=undone) as proxy:
        words = ("train", *SMALL, "--infer", of(proxy.url, "prefill=true"), "--out", out)
        stopped = probe(*words, "--steps", 8)
    assert stopped.returncode == ExitCode.GATE_FAILED, stopped
    events = lines(out, "events")
    assert {event["guard"] for event in events} & set(GUARDS_ON_SYNCS)
    assert min(event["step"] for event in events) == 3


def test_without_prefill_the_guards_that_need_it_are_said_to_be_off(vllm: RealServer, tmp_path: Path) -> None:
    words = ("train", *SMALL, "--temperature", "0.8", "--infer", of(vllm.url), "--steps", "2", "--out", tmp_path / "r")
    refused = probe(*words)
    assert refused.returncode == ExitCode.USAGE
    assert "gives log-probs of before temperature, and --temperature is 0.8" in refused.stderr
    vllm.begin_update()
    at_one = [word for word in words if word not in ("--temperature", "0.8")]
    done = probe(*at_one, "--json", code=ExitCode.PASS)
    off = json.loads(done.stdout)["guards_off"]
    assert off.keys() == {"stale-engine", "engine-weights", "engine-layer"}
    assert off["stale-engine"] == ["sync/engine_unchanged"]


def test_an_update_that_the_server_refuses_is_one_sentence(vllm: RealServer, tmp_path: Path) -> None:
    updates = [0]

    def spoiled(path: str, body: Json) -> Json:
        updates[0] += path == "/update_weights"
        if path == "/update_weights" and updates[0] == 3:
            body["update_info"]["dtype_names"][0] = "no_dtype"
        return body

    out = tmp_path / "run"
    with Proxy(vllm.url, spoiled) as proxy:
        words = ("train", *SMALL, "--infer", of(proxy.url, "timeout_seconds=30"), "--out", out)
        ended = probe(*words, "--steps", STEPS, "--checkpoint-every", 1)
        assert ended.returncode == ExitCode.ENVIRONMENT
        assert "answers /update_weights with 500" in ended.stderr
        probe(*words, "--steps", 3, "--checkpoint-every", 1, "--resume", code=ExitCode.PASS)
    assert [line["step"] for line in lines(out, "metrics")] == [1, 2, 3]


def test_a_killed_server_ends_the_run_in_one_sentence_and_the_next_goes_on(vllm: RealServer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Proxy(vllm.url) as proxy:
        words = [*SMALL, "--infer", of(proxy.url), "--steps", "40", "--checkpoint-every", "1", "--out", str(out)]
        errors = tmp_path / "stderr"
        with warm_process("mismatch_probe", "train", *words, folder=tmp_path, errors=errors) as command:
            while len(lines(out, "metrics")) < 2:
                assert command.poll() is None, "it ended before the server was killed"
                time.sleep(0.05)
            vllm.kill()
            try:
                assert command.wait() == ExitCode.ENVIRONMENT
            finally:
                vllm.start()
        answers = [line for line in errors.read_text().splitlines() if "the server at" in line]
        assert len(answers) == 1
        before = lines(out, "metrics")
        again = ("train", *SMALL, "--infer", of(proxy.url), "--checkpoint-every", "1", "--out", out, "--resume")
        probe(*again, "--steps", len(before) + 1, code=ExitCode.PASS)
    after = lines(out, "metrics")
    assert len(after) == len(before) + 1
    assert after[-1]["mismatch/kl_k3"] < 1e-3


def test_another_s_weights_in_the_server_end_the_run(vllm: RealServer, other_weights: Path, tmp_path: Path) -> None:
    num_asked = [0]

    def meddle(path: str, body: Json, reply: Reply) -> Reply:
        num_asked[0] += path == "/finish_weight_update" and "weight_version" in body
        if path == GENERATE and num_asked[0] == 2:
            num_asked[0] += 1
            vllm.label("someone-else")
        return reply

    with Proxy(vllm.url, after=meddle) as proxy:
        words = ("train", *SMALL, "--infer", of(proxy.url), "--steps", STEPS, "--out", tmp_path / "run")
        ended = probe(*words)
    assert ended.returncode == ExitCode.ENVIRONMENT
    assert "to someone-else while it was measured" in ended.stderr
    assert "is sent weights by someone else" in ended.stderr


def test_workers_that_never_come_to_the_meeting_are_waited_for_within_a_limit() -> None:
    answers = json.loads(warm_python("tests.servers.meeting", 200, 1).stdout)
    assert "its workers did not come to 127.0.0.1:" in answers["told"]
    assert "within 1 s: see that its machine reaches this address and port" in answers["told"]
    assert answers["seconds"] < 20
    refused = json.loads(warm_python("tests.servers.meeting", 400, 60).stdout)
    assert "refuses a request to /init_weight_transfer_engine" in refused["told"]
    assert refused["seconds"] < 20
    assert json.loads(warm_python("tests.servers.meeting", 200, 60, "worker").stdout)["told"] == "they met"


def test_two_ranks_sample_from_one_server_and_the_first_sends_it_weights(vllm: RealServer, tmp_path: Path) -> None:
    """No rank asks it for tokens before they have met: a request in the middle of an update ends a server."""
    out = tmp_path / "run"
    words = ("train", *SMALL, "--infer", of(vllm.url, "prefill=true"), "--steps", "2", "--out", out)
    warm_ranks(2, "mismatch_probe", *words)
    metrics = lines(out, "metrics")
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["sync/weights_compared"] == 1.0
        assert line["sync/weights_unchanged"] == line["sync/weights_other"] == line["sync/engine_unchanged"] == 0.0
        assert line["mismatch/kl_k3"] < 1e-3
    assert json.loads((out / "manifest.json").read_text())["guards_off"] == {}
    assert not lines(out, "events")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("prod:url=http://127.0.0.1:9", "does not say how; give transfer=gloo"),
        ("prod:url=http://127.0.0.1:9,transfer=gloo", "cannot be reached"),
        ("prod:url=http://127.0.0.1:9,transfer=smoke", "transfer"),
        ("bf16", "--infer names a server here"),
    ],
)
def test_what_cannot_be_sampled_from_is_refused_at_once(given: str, sentence: str, tmp_path: Path) -> None:
    refused = probe("train", *SMALL, "--infer", given, "--out", tmp_path / "run")
    assert refused.returncode in (ExitCode.USAGE, ExitCode.ENVIRONMENT)
    assert sentence in refused.stderr
    assert not (tmp_path / "run").exists()
