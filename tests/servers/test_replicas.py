"""Two real servers: as replicas of each other, alike and with one stale, and behind one address as a mixture."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary, SettingFinding, Summary
from mismatch_probe.verdict.preflight import preflight
from mismatch_probe.verdict.preflight.facts import Sides
from tests.command_line import FEW, probe
from tests.servers.asking import started
from tests.servers.proxy import Proxy, Reply
from tests.servers.real_server import TAKES_WEIGHTS, RealServer, WarmServer, demo_checkpoint

pytestmark = pytest.mark.slow

SMALL = ("--model", "demo", "--prompts", "sums:easy", "--num-prompts", "12", "--max-new-tokens", "24")


class Balancer(Proxy):
    """One address: each request goes to the next of several servers."""

    def __init__(self, *targets: str) -> None:
        super().__init__(targets[0])
        self._next = itertools.cycle(targets)

    def reply_to(self, method: str, path: str, headers: dict[str, str], body: Any) -> Reply:
        self.target = next(self._next)
        return super().reply_to(method, path, headers, body)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with WarmServer(tmp_path_factory.mktemp("second") / "log", "--enable-scale-out", *TAKES_WEIGHTS) as server:
        yield server


@contextmanager
def holding(server: RealServer, weights: Path) -> Iterator[None]:
    server.load(weights)
    try:
        yield
    finally:
        server.load(demo_checkpoint())


def compared(out: Path, *servers: RealServer) -> Summary:
    """bf16 here against each server, one request at a time, so that equal servers give equal bits."""
    urls = json.dumps([server.url for server in servers])
    sides = ("--config", FEW, "--train", "bf16", "--infer", f"prod:url={urls},concurrency=1,tries=2")
    probe("compare", *SMALL, *sides, "--out", out, code=ExitCode.PASS)
    return RunDirectory(out).read_summary()


def pair(summary: Summary, name: str) -> PairSummary:
    return next(one for one in summary.pairs if one.infer == name)


def about_replicas(summary: Summary) -> list[SettingFinding]:
    return [finding for finding in summary.preflight if finding.setting == "replicas"]


def test_replicas_of_one_policy_have_the_numbers_of_one(vllm: RealServer, second: RealServer, tmp_path: Path) -> None:
    summary = compared(tmp_path / "run", vllm, second)
    [alike] = about_replicas(summary)
    assert alike.level == "note"
    assert alike.what.startswith("prod-1, prod-2 say the same of themselves and answer one question alike")
    one, other = (pair(summary, name).metrics for name in ("prod-1", "prod-2"))
    assert one["kl_k3"] == other["kl_k3"]
    assert one["abs_logprob_diff"] == other["abs_logprob_diff"]


def test_a_stale_replica_is_named(vllm: RealServer, second: RealServer, other_weights: Path, tmp_path: Path) -> None:
    with holding(second, other_weights):
        summary = compared(tmp_path / "run", vllm, second)
    [stale] = about_replicas(summary)
    assert stale.level == "error"
    assert stale.what.startswith("prod-2 is another policy than its replica prod-1: it answers one question otherwise")
    assert "times as far from the training path's" in stale.what
    honest, off = (pair(summary, name).metrics["abs_logprob_diff"] for name in ("prod-1", "prod-2"))
    assert off.value > 5 * honest.value
    page = RunDirectory(tmp_path / "run").report_path.read_text(encoding="utf-8")
    assert "prod-2 is another policy than its replica prod-1" in page


def mixture(engine: Engine) -> list[SettingFinding]:
    sides = Sides(Dtype.BF16, Dtype.BF16, {"dtype": "bf16", "temperature": 1.0}, engine.effective_settings())
    named = ("asked.processes", "asked.again, asked.in_a_crowd")
    return [finding for finding in preflight(sides) if finding.setting in named]


def test_replicas_behind_one_address_are_counted_and_a_stale_one_among_them_shows(
    vllm: RealServer, second: RealServer, other_weights: Path
) -> None:
    with started(vllm.url) as alone:
        assert alone.effective_settings()["asked"]["processes"] == 1
        assert mixture(alone) == []
    with Balancer(vllm.url, second.url) as balancer:
        with started(balancer.url) as alike:
            [counted] = mixture(alike)
        with holding(second, other_weights), started(balancer.url) as mixed:
            [stale] = mixture(mixed)
    assert (counted.level, counted.setting) == ("note", "asked.processes")
    assert counted.what.startswith("2 servers answer at this address and are measured as one")
    assert stale.level == "warning"
    assert stale.what.startswith("2 servers answer at this address and give one question answers")


def test_a_mixture_shows_where_no_server_says_when_it_was_started(
    vllm: RealServer, second: RealServer, other_weights: Path
) -> None:
    with Balancer(vllm.url, second.url) as balancer, holding(second, other_weights):
        balancer.after = lambda path, body, reply: Reply.of({}, 404) if path == "/metrics" else reply
        with started(balancer.url) as mixed:
            assert mixed.effective_settings()["asked"]["processes"] is None
            [stale] = mixture(mixed)
    assert stale.what.startswith("what answers at this address gives one question answers")
