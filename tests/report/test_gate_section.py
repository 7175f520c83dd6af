"""What a gate said stands on the page of the run that it judged."""

import re
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.answers import GATE_FILE, CheckResult, GateResult, Look
from mismatch_probe.records.manifest import write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import Filed, render_html, write_report
from tests.report import samples
from tests.report.test_hostile import PAYLOADS
from tests.report.test_hostile_documents import assert_acts_not, attacked

PAIR: samples.Pairs = ((Dtype.BF16, Dtype.BF16),)
BROKEN = CheckResult(
    metric="kl_k3",
    measured="kl_k3",
    pair="bf16/bf16",
    kind="max",
    limit=1e-5,
    level="error",
    answer="fail",
    sentence="kl_k3 of bf16/bf16 is 2.0e-4; max 1e-05 is broken",
    value=2e-4,
    low=1.8e-4,
    high=2.3e-4,
    bound_level=0.95,
    p_value=1e-6,
    holm_level=0.05,
    passing_limit=2.3e-4,
    run_value=2e-4,
    baseline_value=None,
    comparison=None,
    num_sequences=256,
    num_tokens=20_000,
    by="token",
    source="",
)
LOOK = Look(number=1, declared=[256], num_sequences=256, fraction=1, spent=0.05, nominal_level=0.95)
FAILED = GateResult(
    tool_version="0",
    answer="fail",
    exit_code=ExitCode.GATE_FAILED,
    sentence="The gate failed: 1 of 1 check is broken.",
    run="runs/mine",
    gate_file="ci/mismatch.toml",
    look=LOOK,
    checks=[BROKEN],
    notes=["The baseline has no FP16."],
)


def page_of(result: GateResult) -> str:
    return render_html(samples.undrawn(samples.summary(PAIR)), samples.manifest(PAIR), Filed(gate=result))


@pytest.mark.slow
def test_the_answer_stands_at_the_top_and_every_check_in_a_section() -> None:
    page = page_of(FAILED)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"</?span[^>]*>", "", page)))
    assert "gate mismatch.toml: fail" in page[page.index("<header") : page.index("</header>")]
    assert "Judged by ci/mismatch.toml, on 256 responses." in text
    for words in ("✕ gate: fail", FAILED.sentence, BROKEN.sentence, "kl_k3 max 1e-05", FAILED.notes[0]):
        assert words in text


def test_a_page_without_a_gate_says_nothing_of_one() -> None:
    assert 'id="gate"' not in render_html(samples.undrawn(samples.summary(PAIR)), samples.manifest(PAIR))


@pytest.mark.slow
def test_a_page_that_is_rendered_again_keeps_what_the_gate_said(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_summary(samples.undrawn(samples.summary(PAIR)))
    run.write_manifest(samples.manifest(PAIR))
    write_document(tmp_path / GATE_FILE, FAILED)
    page = write_report(run).read_text(encoding="utf-8")
    assert FAILED.sentence in page
    assert "<code>gate.json</code>" in page


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_what_a_stranger_wrote_into_a_gates_answer_is_text(payload: str) -> None:
    assert_acts_not(page_of(attacked(FAILED, payload, least=5)))


def test_the_command_that_goes_on_stands_apart_and_can_be_copied() -> None:
    command = "mismatch-probe compare --resume --out runs/mine --gate ci/mismatch.toml"
    open_answer = FAILED.model_copy(update={"answer": "inconclusive", "next_command": command})
    page = re.sub(r"</?span>", "", page_of(open_answer))
    assert f'<pre class="block" tabindex="0"><code>{command}</code></pre>' in page


def test_what_is_inconclusive_is_not_called_broken() -> None:
    open_check = BROKEN.model_copy(update={"answer": "inconclusive", "sentence": "too few"})
    page = page_of(FAILED.model_copy(update={"checks": [BROKEN, open_check]}))
    section = page[page.index('id="gate"') :]
    assert (
        section.index("<h4>Broken</h4>")
        < section.index("kl_k3 of bf16/bf16 is")
        < section.index("<h4>Inconclusive</h4>")
    )
    assert section.index("<h4>Inconclusive</h4>") < section.index("too few")


def test_a_warning_is_not_called_broken() -> None:
    warning = BROKEN.model_copy(update={"level": "warn", "sentence": "the whole is loose"})
    page = page_of(FAILED.model_copy(update={"answer": "inconclusive", "checks": [warning]}))
    section = page[page.index('id="gate"') :]
    assert section.index("<h4>Warnings</h4>") < section.index("the whole is loose")
    assert "<h4>Broken</h4>" not in section


def test_a_gate_that_refused_to_judge_is_not_on_the_first_screen() -> None:
    refused = FAILED.model_copy(update={"answer": "error", "checks": [], "sentence": "Nothing could be judged."})
    assert "gate mismatch.toml: fail" in _facts(page_of(FAILED))
    assert "gate mismatch.toml" not in _facts(page_of(refused))
    assert "Nothing could be judged." in page_of(refused)


def _facts(page: str) -> str:
    return page[page.index('<ul class="facts">') : page.index("</header>")]
