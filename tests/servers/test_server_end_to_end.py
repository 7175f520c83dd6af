"""`compare` against a real server: it says what the engine in this process says, and goes on where it was stopped."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mismatch_probe.compare import examination
from mismatch_probe.compare.stages import SampleStage
from mismatch_probe.engines.server.arguments import KEY_VARIABLE
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.records.tables import read_table
from tests.command_line import FEW, Answer, probe
from tests.ports import free_port
from tests.servers.proxy import GENERATE, Json, Proxy, Reply
from tests.servers.real_server import RealServer, demo_checkpoint
from tests.warm_python import WarmProcess, warm_process, warm_python

pytestmark = pytest.mark.slow

SMALL = ("--model", "demo", "--prompts", "sums:easy", "--num-prompts", "12", "--max-new-tokens", "24")
SHORT_TOKENS = 6
SHORT = (*SMALL, "--max-new-tokens", str(SHORT_TOKENS))
"""For what no statistic says."""
IN_FOUR_BATCHES = "[engine]\nbatch_sequences = 3\n" + FEW.read_text()
KEY = "sk-not&to/be-seen-51423"
FIRST_BATCH_SECONDS = 240.0
ERRORS = "stderr"


def of_server(url: str, *more: str) -> str:
    return ",".join([f"prod:url={url}", "tries=2", *more])


@pytest.fixture(scope="module")
def run(vllm: RealServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunDirectory, Proxy]]:
    """The engine here and the server, both in BF16, and the engine here in FP32; whatever the server was asked."""
    out = tmp_path_factory.mktemp("server") / "run"
    config = out.parent / "sides.toml"
    with Proxy(vllm.url) as proxy:
        config.write_text(f"""
pairs = [["bf16", "bf16"], ["fp32", "fp32"], ["bf16", "prod"]]
infer = [{{ name = "prod", url = "{proxy.url}" }}]
{FEW.read_text()}""")
        probe("compare", *SMALL, "--samples-per-prompt", "2", "--config", config, "--out", out, code=ExitCode.PASS)
        yield RunDirectory(out), proxy


def pair(run: RunDirectory, name: str) -> PairSummary:
    return next(one for one in run.read_summary().pairs if f"{one.train}/{one.infer}" == name)


def test_the_server_and_the_engine_here_measure_the_same(run: tuple[RunDirectory, Proxy]) -> None:
    here, there = (pair(run[0], name) for name in ("bf16/bf16", "bf16/prod"))
    for name in ("kl_k3", "abs_logprob_diff"):
        ours, theirs = here.metrics[name], there.metrics[name]
        assert ours.low is not None
        assert ours.high is not None
        assert ours.low <= theirs.value <= ours.high, name
    assert here.verdict.kind == there.verdict.kind == "precision"
    assert there.verdict.code == "settings"
    assert there.settings_contrast is not None
    assert there.settings_contrast.counterpart == ("bf16", "bf16")
    ratio = there.settings_contrast.ratios["kl_k3"]
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low <= 1 <= ratio.high


def test_prompt_log_probs_were_never_asked_for(run: tuple[RunDirectory, Proxy]) -> None:
    questions = [body for path, _, body in run[1].seen if path == GENERATE and "sampling_params" in body]
    assert len(questions) > 24
    assert {body["sampling_params"]["prompt_logprobs"] for body in questions} == {None}
    stages = run[0].read_manifest().stages
    assert not {"replay-prod", "distributions-prod", "compare-full-bf16-prod"} & stages.keys()
    assert {"replay-bf16", "distributions-bf16", "compare-full-bf16-bf16"} <= stages.keys()


def test_the_page_says_what_the_server_was_found_to_do(run: tuple[RunDirectory, Proxy]) -> None:
    page = run[0].report_path.read_text(encoding="utf-8")
    for words in (
        "prod: what the server was found to do",
        "the same among others",
        "a server (vLLM 0.",
        "the server does not label its weights",
        run[1].url,
    ):
        assert words in page
    assert "the server was not asked for prompt log-probs, whole distributions or experts" in page


def test_with_prefill_the_server_scores_one_response_after_the_other(vllm: RealServer, tmp_path: Path) -> None:
    at_once = [0, 0]

    def begins(path: str, body: Json) -> Json:
        if "sampling_params" in body and body["sampling_params"]["prompt_logprobs"]:
            at_once[0] += 1
            at_once[1] = max(at_once)
        return body

    def ends(path: str, body: Json, reply: Reply) -> Reply:
        if isinstance(body, dict) and body.get("sampling_params", {}).get("prompt_logprobs"):
            at_once[0] -= 1
        return reply

    with Proxy(vllm.url, begins, ends) as proxy:
        side = of_server(proxy.url, "prefill=true")
        words = ("--config", FEW, "--train", "bf16", "--infer", side, "--out", tmp_path / "run")
        probe("compare", *SHORT, *words, code=ExitCode.PASS)
        assert at_once == [0, 1]
    summary = pair(RunDirectory(tmp_path / "run"), "bf16/prod")
    assert summary.blame is not None
    assert summary.counts.missing_mu == 0
    assert RunDirectory(tmp_path / "run").leg_path("infer-prod-prefill").exists()
    long = ("--max-new-tokens", "300")
    refused = probe(
        "compare",
        *SMALL,
        *long,
        "--train",
        "bf16",
        "--infer",
        of_server(vllm.url, "prefill=true", "longest_prefill=200"),
    )
    assert refused.returncode == ExitCode.USAGE
    assert "would ask for the prompt log-probs of" in refused.stderr
    assert "the limit is 200" in refused.stderr


def test_a_server_that_is_not_there_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    side = of_server(f"http://127.0.0.1:{free_port()}")
    for more in ((), ("--dry-run",)):
        refused = probe("compare", *SMALL, "--train", "bf16", "--infer", side, *more, "--out", tmp_path / "run")
        assert refused.returncode == ExitCode.ENVIRONMENT
        assert "cannot be reached" in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_what_it_cannot_tell_of_a_server(vllm: RealServer, tmp_path: Path) -> None:
    words = ("--train", "bf16", "--infer", of_server(vllm.url), "--out", tmp_path / "run")
    planned = probe("compare", *SMALL, *words, "--dry-run", code=ExitCode.PASS)
    assert (
        "and what the server takes over sample-prod, sample-infer-prod-alone, which nothing here shows"
        in planned.stdout
    )
    assert "memory: engine-prod" not in planned.stdout
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_the_server_has_no_room_for_is_refused(vllm: RealServer, tmp_path: Path) -> None:
    def small(path: str, body: Json, reply: Reply) -> Reply:
        if path != "/v1/models":
            return reply
        content = reply.json
        content["data"][0]["max_model_len"] = 16
        return Reply.of(content)

    with Proxy(vllm.url, after=small) as proxy:
        words = ("--train", "bf16", "--infer", of_server(proxy.url), "--out", tmp_path / "run")
        refused = probe("compare", *SMALL, *words)
    assert refused.returncode == ExitCode.USAGE
    assert "holds 16 tokens, which leaves prompt" in refused.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "batches.toml"
    path.write_text(IN_FOUR_BATCHES)
    return path


def recorded(out: Path) -> tuple[pa.Table, pa.Table]:
    run = RunDirectory(out)
    return read_table(run.rollouts_path), read_table(run.leg_path("infer-prod-decode"))


def recorded_so_far(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of the parts of sampling, by what they are of."""
    stage = SampleStage(RunDirectory(out).read_manifest().settings.mu("prod"))
    parts = RunDirectory(out).parts(stage.name, stage.outputs)
    done = sum(parts.is_done(number) for number in range(4))
    assert 0 < done < 4
    return {output: parts.read(done, output).to_pylist() for output in stage.outputs}


def check_nothing_was_lost(out: Path, before: dict[str, list[dict[str, Any]]]) -> None:
    """What was recorded stands there unchanged, and what was not once each."""
    for rows, now in zip(before.values(), recorded(out), strict=True):
        by_id = {row["id"]: row for row in now.to_pylist()}
        assert len(by_id) == now.num_rows == 12
        assert all(by_id[row["id"]] == row for row in rows)


def begun(words: list[str], folder: Path) -> AbstractContextManager[WarmProcess]:
    """`compare` beside the body, in that folder."""
    return warm_process("mismatch_probe", "compare", *words, folder=folder, errors=folder / ERRORS)


def wait_for_a_part(out: Path, command: WarmProcess) -> None:
    until = time.monotonic() + FIRST_BATCH_SECONDS
    while not list(out.glob("parts/sample-prod/*")):
        assert command.poll() is None, "it ended before it was killed"
        assert time.monotonic() < until
        time.sleep(0.02)


def slowly(path: str, body: Json, reply: Reply) -> Reply:
    """Responses alone: what the server is found to do was asked before."""
    time.sleep(0.3 if path == GENERATE and body.get("sampling_params", {}).get("max_tokens") == SHORT_TOKENS else 0)
    return reply


def as_it_is(path: str, body: Json, reply: Reply) -> Reply:
    return reply


def test_a_killed_command_goes_on_with_the_same_policy_alone(
    vllm: RealServer, other_weights: Path, tmp_path: Path, config: Path
) -> None:
    out = tmp_path / "run"
    with Proxy(vllm.url, after=slowly) as proxy:
        side = ("--infer", of_server(proxy.url))
        words = [*SHORT, "--train", "bf16", *side, "--config", str(config), "--out", str(out)]
        with begun(words, tmp_path) as command:
            wait_for_a_part(out, command)
            os.kill(command.pid, signal.SIGKILL)
            assert command.wait() == -signal.SIGKILL
        before = recorded_so_far(out)
        proxy.after = as_it_is
        go_on = ("compare", "--resume", "--out", out)
        again = probe(*go_on)
        assert again.returncode == ExitCode.USAGE
        assert "nor is a server's address; give it again if you trust it" in again.stderr
        vllm.load(other_weights)
        try:
            other = probe(*go_on, *side)
        finally:
            vllm.load(demo_checkpoint())
        assert other.returncode == ExitCode.ENVIRONMENT
        assert "it holds other weights now" in other.stderr
        probe(*go_on, *side, code=ExitCode.PASS)
    check_nothing_was_lost(out, before)


def test_a_killed_server_loses_nothing(vllm: RealServer, tmp_path: Path, config: Path) -> None:
    out = tmp_path / "run"
    with Proxy(vllm.url, after=slowly) as proxy:
        side = ("--infer", of_server(proxy.url))
        words = [*SHORT, "--train", "bf16", *side, "--config", str(config), "--out", str(out)]
        with begun(words, tmp_path) as command:
            wait_for_a_part(out, command)
            vllm.kill()
            try:
                assert command.wait() == ExitCode.ENVIRONMENT
            finally:
                vllm.start()
        errors = (tmp_path / ERRORS).read_text()
        assert "breaks off its answer to /inference/v1/generate" in errors
        assert "Continue with:\n    mismatch-probe compare --resume --out" in errors
        before = recorded_so_far(out)
        proxy.after = as_it_is
        probe("compare", "--resume", "--out", out, *side, code=ExitCode.PASS)
    check_nothing_was_lost(out, before)


def test_a_key_is_sent_and_stands_nowhere(
    vllm: RealServer, tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the server repeats it, escaped as JSON may be: in what it says of its model, in an error."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    out, failing = tmp_path / "run", [False]

    def telling(path: str, body: Json, reply: Reply) -> Reply:
        if failing[0] and path == GENERATE:
            return Reply.of({"error": {"message": f"Bearer {KEY} has no quota"}}, 500)
        content = reply.json
        if path == "/v1/models":
            content["data"][0]["root"] = f"/models/{KEY}"
        escaped = json.dumps(content).replace(KEY, "".join(f"\\u{ord(character):04x}" for character in KEY))
        return Reply(reply.status, escaped.encode())

    with Proxy(vllm.url, after=telling) as proxy:
        side = ("--infer", of_server(proxy.url))
        words = [*SHORT, "--train", "bf16", *side, "--config", config, "--out", out]
        done = probe("compare", *words, code=ExitCode.PASS)
        failing[0] = True
        failed = probe("compare", *words[:-1], tmp_path / "failed")
        assert failed.returncode == ExitCode.ENVIRONMENT
        assert "Bearer [key] has no quota" in failed.stderr
        assert {headers.get("Authorization") for _, headers, _ in proxy.seen} == {f"Bearer {KEY}"}
    assert KEY not in done.stderr + done.stdout + failed.stderr + failed.stdout
    assert "/models/[key]" in RunDirectory(out).manifest_path.read_text()
    files = [path for folder in (out, tmp_path / "failed") for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_no_vllm_is_needed_where_the_server_is_elsewhere(vllm: RealServer, tmp_path: Path) -> None:
    """Every process of the command finds no package of that name, and what its jobs are forked from has not asked."""
    words = ("compare", *SHORT, "--config", FEW, "--num-prompts", "4", "--train", "bf16")

    def compare(*more: object, code: ExitCode) -> Answer:
        return warm_python("tests.servers.without_vllm", *words, *more, preload="training", code=code)

    absent = compare("--infer", "bf16", code=ExitCode.ENVIRONMENT)
    assert "vllm cannot be found here; run `pip install 'mismatch-probe[vllm-cuda]'`" in absent.stderr
    compare("--infer", of_server(vllm.url), "--out", tmp_path / "run", code=ExitCode.PASS)
    assert pair(RunDirectory(tmp_path / "run"), "bf16/prod").counts.num_sequences == 4


def test_another_model_of_the_same_vocabulary_is_no_precision(
    vllm: RealServer, other_weights: Path, tmp_path: Path
) -> None:
    words = ("--model", other_weights, *SMALL[2:], "--config", FEW, "--train", "bf16", "--infer", of_server(vllm.url))
    probe("compare", *words, "--out", tmp_path / "run", code=ExitCode.PASS)
    verdict = pair(RunDirectory(tmp_path / "run"), "bf16/prod").verdict
    assert verdict.kind == "undecided"
    assert any("mostly on the engine's side" in evidence for evidence in verdict.evidence)
    [advice] = verdict.advice
    assert "shows what only the server does: weights other than the checkpoint's" in advice
    assert "--train bf16:dtype=bf16 --train fp32:dtype=fp32 --infer bf16:dtype=bf16 --infer fp32:dtype=fp32" in advice


def test_a_temperature_that_no_log_prob_shows_is_a_bug(vllm: RealServer, tmp_path: Path) -> None:
    def colder(path: str, body: Json) -> Json:
        if "sampling_params" not in body:
            return body
        return {**body, "sampling_params": {**body["sampling_params"], "temperature": 0.3}}

    with Proxy(vllm.url, before=colder) as proxy:
        words = ("--config", FEW, "--train", "bf16", "--infer", of_server(proxy.url), "--out", tmp_path / "run")
        answer = probe("compare", *SMALL, *words, code=ExitCode.PASS)
    verdict = pair(RunDirectory(tmp_path / "run"), "bf16/prod").verdict
    assert (verdict.kind, verdict.code) == ("bug", "temperature")
    assert "the server does not draw its tokens from the log-probs that it gives" in verdict.sentence
    assert "does not draw its tokens" in answer.stdout


def test_doctor_shows_what_a_server_applies(vllm: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No package is imported here: `doctor` imports each of them in `tests/docs/test_lines_as_written.py`."""
    monkeypatch.setattr(examination, "_import_together", lambda packages: (len(packages), "", ""))
    shown = probe("doctor", "--model", "demo", "--infer", of_server(vllm.url), "--json", code=ExitCode.PASS)
    document = json.loads(shown.stdout)
    assert document["effective_settings"]["sample-prod"]["asked"]["echoes_prompt_ids"] is True
    assert [one["package"] for one in document["imports"]] == ["torch", "transformers"]
    refused = probe("doctor", "--infer", of_server(vllm.url))
    assert refused.returncode == ExitCode.USAGE
    assert "give --model too" in refused.stderr
