"""`audit` of a real server, as it is and with something changed between: who is as declared is not accused, and what is
changed is named or at least seen.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mismatch_probe.audit.scoring import (
    QUANTISATIONS,
    Quantisation,
    gumbel_noise,
    round_weight,
)
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.examinations import Audit
from mismatch_probe.records.findings import Findings
from tests.command_line import probe
from tests.ports import free_port
from tests.servers.proxy import Json, Proxy, Reply
from tests.servers.real_server import RealServer, demo_checkpoint

slow = pytest.mark.slow

SMALL = ("--model", "demo", "--prompts", "sums:long", "--num-prompts", "24", "--max-new-tokens", "96")
"""Of greedy tokens, those of long sums tell most: about a thousand of them tell four bits from rounding."""
FEW = ("--model", "demo", "--prompts", "sums:hard", "--num-prompts", "12", "--max-new-tokens", "96")
"""For what no number decides, and for what many of the tokens show. Prompts are of fifty tokens, and nearly all
responses of as many as are asked for.
"""
UNSURE = ("--temperature", "1.5")
"""At 1 the demo is so sure of its digits that the laws it may be sampled by differ in few of them."""
COMPLETIONS = "/v1/completions"
HEADER = "7+8= "


def audited(url: str, out: Path, *words: object, code: ExitCode, size: tuple[str, ...] = SMALL) -> Audit:
    """With one document on standard output, which is the one that is filed."""
    answer = probe("audit", *size, "--server", url, *words, "--out", out, "--json", code=code)
    assert json.loads(answer.stdout) == json.loads((out / "audit.json").read_text(encoding="utf-8"))
    document = Findings(out).audit()
    assert document is not None
    assert document.exit_code == code
    return document


@contextmanager
def asking_with(vllm: RealServer, **other: Any) -> Iterator[Proxy]:
    """A provider that samples with settings of its own, whatever it is asked for."""

    def change(path: str, body: Json) -> Json:
        return body | other if path == COMPLETIONS and "prompt" in body else body

    with Proxy(vllm.url, change) as proxy:
        yield proxy


@dataclass(frozen=True)
class Greedy:
    """An audit of the server as it is, which has a header to try, its folder, and what the server was asked."""

    document: Audit
    out: Path
    questions: list[Json]


@pytest.fixture(scope="module")
def greedy(vllm: RealServer, tmp_path_factory: pytest.TempPathFactory) -> Greedy:
    out = tmp_path_factory.mktemp("greedy") / "run"
    with Proxy(vllm.url) as proxy:
        document = audited(proxy.url, out, "--header", HEADER, code=ExitCode.PASS)
        return Greedy(document, out, [body for path, _, body in proxy.seen if path == COMPLETIONS])


@slow
def test_a_greedy_server_is_as_declared_and_the_page_says_so(greedy: Greedy) -> None:
    out, agreement = greedy.out, greedy.document.agreement
    assert agreement is not None
    assert agreement.equal.value > 0.99
    assert agreement.noise_low < 3
    assert agreement.near_ties >= agreement.num_differing - 1, "kernels that round to BF16 toward zero move one farther"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "As declared: the tokens are those of demo in BF16, greedy decoding." in page
    assert "likelihood over that as declared" not in page
    again = probe("report", out, "--json")
    assert json.loads(again.stdout)["mode"] == "greedy"


@slow
def test_a_header_that_no_provider_adds_accuses_nobody(greedy: Greedy) -> None:
    assert greedy.document.settings.headers == (HEADER,)
    assert greedy.document.verdict.cause is None
    assert greedy.document.verdict.kind != "bug"


@slow
def test_no_log_probs_are_asked_for(greedy: Greedy) -> None:
    assert len(greedy.questions) == 24
    assert not any("logprobs" in body or "prompt_logprobs" in body for body in greedy.questions)


@slow
def test_tokens_of_weights_in_four_bits_are_named(vllm: RealServer, tmp_path: Path) -> None:
    vllm.load(with_weights(tmp_path / "int4", QUANTISATIONS[-1]))
    try:
        document = audited(vllm.url, tmp_path / "run", "--num-prompts", 16, code=ExitCode.GATE_FAILED)
    finally:
        vllm.load(demo_checkpoint())
    assert document.agreement is not None
    assert document.agreement.noise_low > 2
    assert document.verdict.cause == "weights in int4 (a scale a row)"


@slow
def test_other_weights_are_seen_where_none_that_was_tried_fits(
    vllm: RealServer, other_weights: Path, tmp_path: Path
) -> None:
    vllm.load(other_weights)
    try:
        document = audited(vllm.url, tmp_path / "run", "--num-prompts", 8, code=ExitCode.GATE_FAILED)
    finally:
        vllm.load(demo_checkpoint())
    assert document.verdict.cause is None
    assert "other weights" in document.verdict.sentence


@slow
def test_sampled_tokens_are_as_declared_and_each_is_foretold_by_its_seed(vllm: RealServer, tmp_path: Path) -> None:
    words = (*UNSURE, "--noise", "vllm-cpu")
    document = audited(vllm.url, tmp_path / "run", *words, code=ExitCode.PASS, size=FEW)
    assert document.mode == "predicted"
    assert document.agreement is not None
    assert document.agreement.equal.value > 0.98, "kernels that round to BF16 toward zero turn twice as many near ties"
    assert document.law is not None
    assert document.law.p_value > 1e-3
    assert document.law.temperature_low < 1.05 * 1.5
    assert document.law.temperature_high > 0.95 * 1.5


@slow
@pytest.mark.parametrize(
    ("other", "name"),
    [({"temperature": 0.3}, "temperature"), ({"top_k": 1}, "top-"), ({"top_p": 0.5}, "top-p")],
)
def test_a_provider_that_samples_otherwise_is_named(
    vllm: RealServer, tmp_path: Path, other: dict[str, Any], name: str
) -> None:
    """Alone, or with a setting that a few thousand tokens of a sure model do not tell from it."""
    with asking_with(vllm, **other) as proxy:
        document = audited(proxy.url, tmp_path / "run", *UNSURE, code=ExitCode.GATE_FAILED, size=FEW)
    assert document.verdict.cause is not None
    assert name in document.verdict.cause
    assert "likelihood over that as declared" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@slow
@pytest.mark.parametrize(("temperature", "num_prompts"), [(0.6, 32), (1.4, 12)])
def test_seeds_name_the_temperature_of_a_provider(
    vllm: RealServer, tmp_path: Path, temperature: float, num_prompts: int
) -> None:
    """A colder one moves fewer tokens of a sure model, so that it takes more of them."""
    with asking_with(vllm, temperature=temperature) as proxy:
        words = ("--num-prompts", num_prompts, "--temperature", "1", "--noise", "vllm-cpu")
        document = audited(proxy.url, tmp_path / "run", *words, code=ExitCode.GATE_FAILED, size=FEW)
    assert document.verdict.cause is not None
    assert document.verdict.cause.startswith("temperature ")
    assert abs(float(document.verdict.cause.split()[1]) - temperature) < 0.05
    assert any("the seeds' noise names most tokens" in line for line in document.verdict.evidence)


@slow
def test_seeds_that_are_not_the_servers_foretell_nothing(vllm: RealServer, tmp_path: Path) -> None:
    with asking_with(vllm, seed=11) as proxy:
        words = (*UNSURE, "--noise", "vllm-cpu")
        probe("audit", *FEW, "--server", proxy.url, *words, "--out", tmp_path / "run")
    document = Findings(tmp_path / "run").audit()
    assert document is not None
    assert document.mode == "sampled"
    assert any("the seeds' noise is not what --noise says" in line for line in document.verdict.evidence)
    assert document.verdict.kind != "bug"


@contextmanager
def hidden_header(vllm: RealServer) -> Iterator[Proxy]:
    """A provider that puts a text before every prompt and says nothing of it."""
    ids = AutoTokenizer.from_pretrained(demo_checkpoint())(HEADER, add_special_tokens=False)["input_ids"]

    def before(path: str, body: Json) -> Json:
        return body | {"prompt": [*ids, *body["prompt"]]} if path == COMPLETIONS and "prompt" in body else body

    def after(path: str, body: Json, reply: Reply) -> Reply:
        if path != COMPLETIONS or reply.status != 200:
            return reply
        content = reply.json
        for choice in content["choices"]:
            if choice.get("prompt_token_ids"):
                choice["prompt_token_ids"] = choice["prompt_token_ids"][len(ids) :]
        return Reply.of(content)

    with Proxy(vllm.url, before, after) as proxy:
        yield proxy


@slow
def test_a_text_that_a_provider_puts_before_prompts_is_named_where_it_is_given(
    vllm: RealServer, tmp_path: Path
) -> None:
    with hidden_header(vllm) as proxy:
        few = ("--num-prompts", 8)
        unknown = audited(proxy.url, tmp_path / "unknown", *few, code=ExitCode.GATE_FAILED, size=FEW)
        known = audited(proxy.url, tmp_path / "known", *few, "--header", HEADER, code=ExitCode.GATE_FAILED, size=FEW)
    assert known.verdict.cause is not None
    assert "header" in known.verdict.cause
    assert unknown.verdict.cause is None or "weights" not in unknown.verdict.cause


@slow
def test_an_audit_with_a_run_takes_its_checkpoint_and_prompts_and_is_filed_there(
    vllm: RealServer, tmp_path: Path
) -> None:
    """So few tokens that no verdict on them hangs on how this processor rounds to BF16."""
    run = tmp_path / "run"
    sides = ("--train", "bf16", "--infer", f"prod:url={vllm.url}", "--reference", "none")
    few = ("--num-prompts", "5", "--max-new-tokens", "8")
    probe("compare", *SMALL[:4], *few, *sides, "--out", run, code=ExitCode.PASS)
    [rollouts] = run.glob("**/rollouts*.parquet")
    of_run = set(map(tuple, pq.read_table(rollouts)["prompt_token_ids"].to_pylist()))
    with Proxy(vllm.url) as proxy:
        probe("audit", "--run", run, "--server", proxy.url, *few, code=ExitCode.INCONCLUSIVE)
        questions = [body["prompt"] for path, _, body in proxy.seen if path == COMPLETIONS]
    assert len(of_run) == 5
    assert set(map(tuple, questions)) == of_run
    document = Findings(run).audit()
    assert document is not None
    assert document.responses.num_prompts == 5
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Nothing departs from demo in BF16, greedy decoding, and 40 tokens are too few" in page


@slow
def test_a_server_of_text_alone_is_not_accused_by_its_text(vllm: RealServer, tmp_path: Path) -> None:
    def text_alone(path: str, body: Json, reply: Reply) -> Reply:
        if path != COMPLETIONS or reply.status != 200:
            return reply
        content = reply.json
        for choice in content["choices"]:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        return Reply.of(content)

    with Proxy(vllm.url, after=text_alone) as proxy:
        probe("audit", *FEW, "--server", proxy.url, "--out", tmp_path / "run")
    document = Findings(tmp_path / "run").audit()
    assert document is not None
    assert document.responses.from_text
    assert document.verdict.kind != "bug"


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    refused = probe("audit", *SMALL, "--server", url, "--out", tmp_path / "run")
    assert refused.returncode == ExitCode.ENVIRONMENT
    assert "cannot be reached" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--server", "http://x:1"), "no model to hold the tokens against"),
        (("--model", "demo"), "no server to audit; give --server"),
        (("--model", "demo", "--server", "http://x:1", "--noise", "cuda"), "noise"),
    ],
)
def test_what_is_missing_is_named(words: tuple[str, ...], what: str) -> None:
    refused = probe("audit", *words)
    assert refused.returncode == ExitCode.USAGE
    assert what in refused.stderr


def with_weights(folder: Path, quantisation: Quantisation) -> Path:
    """The demo checkpoint with the weights of its linear layers rounded."""
    shutil.copytree(demo_checkpoint(), folder)
    weights = load_file(folder / "model.safetensors")
    rounded = {
        name: round_weight(weight, quantisation) if name.endswith("proj.weight") else weight
        for name, weight in weights.items()
    }
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@slow
def test_the_noise_is_that_of_vllms_kernel() -> None:
    pytest.importorskip("vllm.platforms").current_platform.import_kernels()
    if not hasattr(torch.ops._C, "fused_gumbel_argmax"):
        pytest.skip("this build of vLLM has no such kernel")
    logits = 3 * torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(64) * 7919
    drawn = torch.ops._C.fused_gumbel_argmax(logits, seeds)
    predicted = (logits.double().numpy() + gumbel_noise(seeds.tolist(), 5000)).argmax(axis=1)
    assert drawn.tolist() == predicted.tolist()
