"""Which format a file or a folder is told to be of."""

import bz2
import gzip
import json
import lzma
import re
import shutil
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import FORMATS, look, recognise
from mismatch_probe.logs.row import read_lines
from tests.logs.reading import DATA, read, written

NEMO_RL = DATA / "nemo_rl" / "train_data_step1.jsonl"


def test_what_fits_nothing_is_refused_with_the_formats(tmp_path):
    path = written(tmp_path / "train_data_step1.jsonl", [{"loss": 0.5}])
    for name in (path, tmp_path):
        with pytest.raises(UsageError, match=r"a known format with --format: plain, nemo_rl, "):
            recognise(name)


EXPORT = {"schema_version": 1, "token_ids": [1], "loss_mask": [1], "inference_logprobs": [-1.0]}


def refusal(path):
    with pytest.raises(UsageError) as caught:
        recognise(path)
    return str(caught.value)


def test_a_refusal_says_which_columns_there_are_and_which_are_needed(tmp_path):
    sentence = refusal(written(tmp_path / "a.jsonl", [{"token_ids": [1], "logprobs": [-1.0], "reward": 1}]))
    assert "it has the columns logprobs, reward, token_ids; the plain format of this tool also needs " in sentence
    assert "prompt_token_ids; rename or add columns, or name a known format" in sentence


def test_a_refusal_names_the_nearest_format_and_what_it_needs_besides(tmp_path):
    path = written(tmp_path / "a.jsonl", [EXPORT])
    assert "; prime-rl's token export also needs trainer_logprobs; rename or add columns" in refusal(path)
    assert f"{path} has the columns" in refusal(tmp_path)
    assert recognise(written(path, [EXPORT | {"trainer_logprobs": [-1.0]}])).name == "prime_rl"


def test_no_format_is_near_to_a_file_that_lacks_most_of_its_columns(tmp_path):
    sentence = refusal(written(tmp_path / "a.jsonl", [{"token_ids": [1], "schema_version": 1}]))
    assert sentence.count("also needs") == 1


def test_the_columns_of_a_table_are_held_against_formats_of_tables(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"step": [1], "prompt": ["a"], **{name: [1] for name in EXPORT}}), path)
    sentence = refusal(path)
    assert re.search(r"; TRL's [^;]* also needs completion; rename", sentence)
    assert "prime-rl's token export" not in sentence


def test_many_columns_are_counted(tmp_path):
    sentence = refusal(written(tmp_path / "a.jsonl", [{f"column_{number:02d}": 1 for number in range(30)}]))
    assert "column_11 and 18 more; the plain format" in sentence


def test_json_that_is_not_in_lines_is_refused_with_how_to_write_it(tmp_path):
    rows = [{"prompt_token_ids": [1], "token_ids": [1], "logprobs": [-1.0]}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=1))
    assert "it is a JSON list, and each of its objects must stand on a line of its own" in refusal(path)
    path.write_text(json.dumps(rows[0], indent=1))
    assert "the plain format of this tool in one JSON document; write each response as an object" in refusal(path)
    assert recognise(written(path, rows)).name == "plain"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(b"{}\n"), "it is compressed, and has to be unpacked first (gunzip)"),
        (bz2.compress(b"{}\n"), "it is compressed, and has to be unpacked first (bunzip2)"),
        (lzma.compress(b"{}\n"), "it is compressed, and has to be unpacked first (unxz)"),
        (b"\x28\xb5\x2f\xfd", "it is compressed, and has to be unpacked first (unzstd)"),
        ("{}\n".encode("utf-16"), "it is UTF-16 text, and has to be saved as UTF-8"),
        (b"Step;run - rollout_corr/k3_kl\n1;0,1\n", "nor a CSV with commas and a column Step"),
        (b"", "it is empty"),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "UTF-16", "semicolons", "empty"],
)
def test_a_file_that_nothing_can_be_read_of_says_why_and_no_format(tmp_path, content, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert refusal(path).startswith(f"the log {path} cannot be read: it is ")
    assert refusal(path).endswith(f"{reason}; fix it, or give another file")
    assert "--format" not in refusal(path)


@pytest.mark.parametrize("names", [("rollouts.parquet", "legs"), ("prompts.parquet", "parts")])
def test_a_run_directory_is_no_log_and_what_reads_it_is_said(tmp_path, names):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    for name in ("manifest.json", *names):
        (run / name).touch()
    assert refusal(run) == f"{run} is a run directory of this tool and no log; `mismatch-probe report {run}` reads it"
    assert "holds nothing but hidden files, folders of trackers and run directories" in refusal(tmp_path)
    (run / names[1]).unlink()
    assert "is a run directory" not in refusal(run)


def test_an_unknown_name_is_refused_with_the_formats(tmp_path):
    with pytest.raises(UsageError, match=r"--format verl3 .* plain, nemo_rl"):
        recognise(tmp_path, "verl3")


def test_nothing_there_is_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="there is no log"):
        recognise(tmp_path / "none")


def test_two_formats_in_a_folder_ask_for_a_name(tmp_path):
    shutil.copy(NEMO_RL, tmp_path / "a.jsonl")
    shutil.copy(DATA / "plain" / "rollouts.jsonl", tmp_path / "b.jsonl")
    with pytest.raises(UsageError, match=r"--format nemo_rl\|plain"):
        recognise(tmp_path)
    assert len(read(tmp_path, "nemo_rl")[0]) == 3
    assert len(read(tmp_path, "plain")[0]) == 6


def test_the_richer_of_two_formats_is_taken():
    assert recognise(DATA / "slime").name == "slime"


def test_of_a_large_file_of_another_kind_only_the_start_is_read(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00" + b"{" + b"\x01" * 10**6)
    monkeypatch.setattr(look, "next_line", lambda file: pytest.fail("it is read on"))
    with pytest.raises(UsageError, match="neither JSON objects, nor parquet, nor a pickle"):
        recognise(path)


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\n \n"])
def test_a_byte_order_mark_or_blank_lines_may_stand_first(start, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(start + NEMO_RL.read_bytes())
    assert len(read(path)[0]) == 3


@pytest.mark.parametrize("name", ["slime/train_data", "skyrl/dumped_data", "miles/dashboard_columns"])
def test_a_step_that_is_cut_off_is_left_out_and_told(name, tmp_path):
    folder = tmp_path / Path(name).name
    shutil.copytree(DATA / name, folder)
    _, last = sorted(folder.iterdir())
    last.write_bytes(last.read_bytes()[:200])
    empty = folder / f"later{last.suffix}"
    empty.touch()
    responses, findings = read(folder)
    assert len(responses) == 3
    [finding] = [each for each in findings if each.code == "unreadable_files"]
    assert sorted(finding.evidence["files"]) == sorted([str(last), str(empty)])
    assert f"{empty}: it is empty" in finding.sentence


def test_steps_are_read_in_their_order(tmp_path):
    for step in (10, 9, 100):
        shutil.copy(NEMO_RL, tmp_path / f"train_data_step{step}.jsonl")
    assert [source.step for source in FORMATS.built_in["nemo_rl"].sources(tmp_path)] == [9, 10, 100]


def test_a_format_that_is_insisted_on_reads_what_it_can_and_says_what_it_cannot(tmp_path):
    with pytest.raises(UsageError, match=r"line 1 of .*token_ids"):
        read(written(tmp_path / "a.jsonl", [{"loss": 0.5}]), "plain")


def test_a_file_that_grows_while_it_is_read_is_read_to_the_size_it_had(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"number": 0}\n' * 3)
    findings = []
    with path.open("a") as file:
        rows = []
        for found in islice(read_lines(path, findings.append), 1000):
            rows.append(found)
            file.write('{"number": 1}\n' * 10_000)
            file.flush()
    assert len(rows) == 3
    assert not findings


def test_a_file_that_grew_is_looked_at_again(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("")
    with pytest.raises(UsageError):
        recognise(path)
    shutil.copy(NEMO_RL, path)
    assert recognise(path).name == "nemo_rl"
