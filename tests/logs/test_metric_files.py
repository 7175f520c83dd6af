"""Files of metrics: each format by a file of its own writer, and what damaged and hostile files end with."""

import json
import sqlite3
import struct
import tomllib
from pathlib import Path

import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.metric_files import has_half_a_step, may_become_metrics, metrics_of, read_metric_log
from mismatch_probe.logs.metric_names import metric_names, quantity_words
from mismatch_probe.logs.tracker_files import masked_crc
from mismatch_probe.stats.catalogue import METRICS
from mismatch_probe.train.trackers import ALIASES

DATA = Path(__file__).parent / "metric_data"
SAMPLES = {
    "verl.jsonl": ("JSON lines", "rollout_corr/k3_kl", 24),
    "verl.log": ("console lines", "rollout_corr/k3_kl", 24),
    "slime.log": ("console lines", "train/train_rollout_logprob_abs_diff", 30),
    "skyrl.log": ("console lines", "policy/rollout_train_logprobs_abs_diff_mean", 30),
    "prime_rl.jsonl": ("JSON lines", "mismatch_kl/all/mean", 40),
    "prime_rl.log": ("console lines", "mismatch_kl/all/mean", 40),
    "nemo_rl.log": ("console lines", "train/gen_kl_error", 30),
    "nemo_rl.json": ("JSON lines", "train/gen_kl_error", 30),
    "nemo_rl.tfevents": ("TensorBoard event files", "train/gen_kl_error", 30),
    "tensorboardx.tfevents": ("TensorBoard event files", "rollout_corr/k3_kl", 30),
    "trackio.db": ("a trackio database", "rollout_corr/k3_kl", 30),
    "areal.log": ("console lines", "ppo_actor/update/compute_logp/kl_div_dual/avg", 4),
    "areal.tfevents": ("TensorBoard event files", "ppo_actor/update/compute_logp/kl_div_dual/avg", 4),
    "roll.log": ("console lines", "actor/train_infer_ratio_token_mean", 30),
    "rllm.log": ("console lines", "optim/kl_sample_train_v2", 30),
    "wandb_chart.csv": ("a CSV", "rollout_corr/k3_kl", 24),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_of_each_writer_is_recognised_and_read(name: str) -> None:
    kind, metric, num_steps = SAMPLES[name]
    log = metrics_of(DATA / name, None)
    assert log is not None
    assert log.kind == kind
    assert len(log.series[metric]) == num_steps


def test_every_sample_is_tested() -> None:
    assert {path.name for path in DATA.iterdir()} == {*SAMPLES, "README.md"}


def test_a_document_of_curves_may_stand_in_one_line(tmp_path: Path) -> None:
    document = json.loads((DATA / "nemo_rl.json").read_text())
    (tmp_path / "metrics.json").write_text(json.dumps(document))
    assert read_metric_log(tmp_path / "metrics.json").series == read_metric_log(DATA / "nemo_rl.json").series


def test_two_ways_to_write_one_run_give_one_curve() -> None:
    lines, console, chart = (read_metric_log(DATA / name) for name in ("verl.jsonl", "verl.log", "wandb_chart.csv"))
    assert lines.series == console.series
    assert chart.series["rollout_corr/k3_kl"] == lines.series["rollout_corr/k3_kl"]
    events, dump, prints = (read_metric_log(DATA / f"nemo_rl.{ending}") for ending in ("tfevents", "json", "log"))
    assert events.series == dump.series
    printed = prints.series["train/gen_kl_error"]
    assert printed == {step: round(value, 4) for step, value in events.series["train/gen_kl_error"].items()}


def test_a_table_of_areal_has_the_values_of_its_event_file() -> None:
    table, events = (read_metric_log(DATA / f"areal.{ending}").series for ending in ("log", "tfevents"))
    assert table.keys() == events.keys()
    for name, curve in events.items():
        assert table[name] == pytest.approx(curve, rel=1e-4), name


def test_a_tag_that_only_looks_like_one_of_roll_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "roll.log").write_text('metrics_tag: {no JSON}\nmetrics_tag: {"step": null, "metrics": {"a": 1}}\n')
    with pytest.raises(UsageError):
        metrics_of(tmp_path / "roll.log", "metrics")


def test_values_of_the_consoles_are_those_of_their_lines() -> None:
    slime, skyrl = (read_metric_log(DATA / f"{name}.log").series for name in ("slime", "skyrl"))
    assert slime["train/tis"][0] == pytest.approx(1.0, abs=0.01)
    assert skyrl["async/staleness_mean"][7] == 2.0
    assert skyrl["policy/policy_entropy"][1] == 0.4


def test_of_several_runs_of_trackio_the_last_is_read_and_said() -> None:
    log = read_metric_log(DATA / "trackio.db")
    assert log.notes == ["trackio.db holds 2 runs; read is the one written to last, new"]
    assert max(log.series["rollout_corr/k3_kl"].values()) < 0.01


def test_every_name_is_one_of_ours_with_its_source() -> None:
    for name in metric_names().values():
        assert name.metric in METRICS or name.metric in quantity_words(), name
        assert name.source.partition(", ")[2].endswith((".py", ".md")), name


def test_names_that_this_tool_sends_to_trackers_mean_the_same_here() -> None:
    sent = {theirs: ours for names in ALIASES.values() for theirs, ours in names.items() if theirs in metric_names()}
    assert len(sent) > 10
    assert {theirs: metric_names()[theirs].metric for theirs in sent} == {
        theirs: ours.split("/")[1] for theirs, ours in sent.items()
    }


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(path: Path, name: str | None = None) -> str:
    with pytest.raises(UsageError) as error:
        metrics_of(path, name)
    return str(error.value)


def test_a_cut_off_file_keeps_its_whole_lines_and_says_so(tmp_path: Path) -> None:
    lines = (DATA / "verl.jsonl").read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(lines[:-200])
    log = read_metric_log(cut)
    assert len(log.series["rollout_corr/k3_kl"]) == 23
    assert log.notes == ["the last line of cut.jsonl was being written, and is left out"]
    events = (DATA / "nemo_rl.tfevents").read_bytes()
    (tmp_path / "cut.tfevents").write_bytes(events[:-10])
    assert "was being written" in read_metric_log(tmp_path / "cut.tfevents").notes[0]


def test_a_damaged_record_is_refused_with_its_place(tmp_path: Path) -> None:
    events = bytearray((DATA / "nemo_rl.tfevents").read_bytes())
    events[len(events) // 2] ^= 0xFF
    path = tmp_path / "damaged.tfevents"
    path.write_bytes(events)
    assert "the record at byte" in refusal(path)
    head = struct.pack("<Q", 30)
    record = head + struct.pack("<I", masked_crc(head)) + b"\x2a\xff" + b"x" * 28
    path.write_bytes(record + struct.pack("<I", masked_crc(record[12:])))
    assert "malformed" in refusal(path)


def test_the_checksum_is_crc_32c() -> None:
    """Of `123456789` it is 0xE3069283; TensorFlow turns it and adds a constant."""
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_database_of_something_else_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    database = sqlite3.connect(path)
    database.execute("CREATE VIEW metrics AS SELECT 1 AS id, 'run' AS run_name, 1 AS step, '{}' AS metrics")
    database.commit()
    database.close()
    assert "without trackio's table metrics" in refusal(path)


def test_metrics_without_a_known_name_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "other.jsonl", '{"step": 1, "loss": 0.5}\n')
    assert "(loss), and none of them is known" in refusal(path)
    assert "has no metric of a known name" in refusal(write(tmp_path / "a.log", "hello\n"), "metrics")


def test_a_line_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    step = '{"step": 1, "rollout_corr/k3_kl": 0.1}\n'
    sentence = refusal(write(tmp_path / "cut.jsonl", f'{step}\n{step}{{"step": 2,\n{step}'))
    assert "cannot be read: line 4: malformed JSON" in sentence
    assert sentence.count("line ") == 1
    assert "line 2 is no JSON object" in refusal(write(tmp_path / "list.jsonl", f"{step}[1]\n"))


def test_empty_cells_of_a_table_are_left_out_and_words_are_said(tmp_path: Path) -> None:
    header = "\ufeffStep,run - rollout_corr/k3_kl,run - notes\r\n"
    sound = write(tmp_path / "sound.csv", f"{header}1,0.1,a\r\n2,,b\r\n3,NaN,c\r\n")
    log = metrics_of(sound, None)
    assert list(log.series["rollout_corr/k3_kl"]) == [1, 3]
    assert log.notes == []
    wrong = write(tmp_path / "wrong.csv", f"{header}1,0.1,a\r\n2,oops,b\r\n3,0.2,c\r\n4,0.3\r\n")
    log = metrics_of(wrong, None)
    assert list(log.series["rollout_corr/k3_kl"]) == [1, 3]
    assert log.notes == [
        "1 line of wrong.csv has another number of cells than its header, and is left out",
        "1 cell of wrong.csv holds no number, and is left out: the first is 'oops' in line 3",
    ]
    assert "step '1.5' is no whole number" in refusal(write(tmp_path / "half.csv", f"{header}1.5,0.1,a\r\n"))


@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 400])
def test_a_metric_larger_than_any_float_is_infinite(tmp_path: Path, number: str) -> None:
    line = f'{{"step": 1, "rollout_corr/k3_kl": {number}}}\n'
    assert metrics_of(write(tmp_path / "a.jsonl", line), None).series["rollout_corr/k3_kl"] == {1: float("inf")}


def test_a_table_of_several_runs_is_refused(tmp_path: Path) -> None:
    header = '"Step","a - rollout_corr/k3_kl","b - rollout_corr/k3_kl"\n'
    assert "of several runs" in refusal(write(tmp_path / "two.csv", f'{header}"1","0.1","0.2"\n'))


def test_a_folder_with_metrics_of_two_kinds_is_asked_about(tmp_path: Path) -> None:
    for name in ("verl.jsonl", "wandb_chart.csv"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    assert "name one of the files" in refusal(tmp_path)
    (tmp_path / "verl.jsonl").unlink()
    assert metrics_of(tmp_path, None).kind == "a CSV"


def test_a_step_that_stands_twice_counts_once_and_is_said(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"step": 1, "rollout_corr/k3_kl": value}) + "\n" for value in (0.1, 0.2))
    log = read_metric_log(write(tmp_path / "twice.jsonl", lines))
    assert log.series["rollout_corr/k3_kl"] == {1: 0.2}
    assert "stand a second time" in log.notes[0]


def test_a_log_of_tokens_is_no_log_of_metrics() -> None:
    tokens = Path(__file__).parent / "data" / "plain" / "rollouts.jsonl"
    assert metrics_of(tokens, None) is None


def test_bands_have_sources() -> None:
    path = Path(__file__).parents[2] / "mismatch_probe" / "verdict" / "curves.toml"
    for band in tomllib.loads(path.read_text())["band"]:
        assert band["source"]
        assert "low" in band or "high" in band


@pytest.mark.parametrize(
    ("content", "is_half"),
    [
        (b'{"step": 0, "kl', True),
        (b'{"step": 0, "kl\n', False),
        (b"step,k3\n", True),
        (b"step,k3\n\n", True),
        (b"step,k3\n0,0.1", True),
        (b"step,k3\n0,0.1\n", False),
        (b"\xef\xbb\xbfstep,k3\r\n0,0.1\r\n", False),
        (b"step,foo,k3\n0,1.0,", True),
        (b"step,\xc3", True),
        (b'"step","a\nb","k3"\n', True),
        (b'"step","k3","a\nb\nc', True),
        (b'"step","a\nb","k3"\n0,1,0.1\n', False),
        (b"a line of text", False),
    ],
)
def test_a_first_step_that_is_being_written_is_known_by_its_rows(
    tmp_path: Path, content: bytes, *, is_half: bool
) -> None:
    path = tmp_path / "metrics"
    path.write_bytes(content)
    assert has_half_a_step(path) == is_half
    assert may_become_metrics(path) == (is_half or content == b"a line of text")
