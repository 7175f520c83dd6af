"""Files that are damaged, or made to do harm: one sentence that names the place, and nothing is run."""

import json
import os
import pickle
import random
import re
import socket
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import FORMATS, LogFinding, recognise, row
from mismatch_probe.logs.formats import skyrl, verl
from mismatch_probe.logs.pickles import StandIn, load
from mismatch_probe.logs.torch_files import TENSOR_NAMES

DATA = Path(__file__).parent / "data"
ROLLOUTS = DATA / "plain" / "rollouts.jsonl"
ROW = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -0.25]}


def refused(path: Path, name: str = "plain") -> str:
    """The sentence that a log is refused with, of one line."""
    with pytest.raises(UsageError) as caught:
        list(FORMATS.built_in[name].read(path, lambda finding: None))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def log(tmp_path):
    def write(*rows: object) -> Path:
        path = tmp_path / "log.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": "34"}, "token_ids is no list"),
        ({"token_ids": [3, -4]}, "token_ids is no list of token ids"),
        ({"token_ids": [3, 2**31]}, "token_ids is no list of token ids"),
        ({"token_ids": [3, 2**80]}, "token_ids is no list of token ids"),
        ({"token_ids": [3.0, 4.5]}, "token_ids is no list of token ids"),
        ({"token_ids": [True, False]}, "token_ids is no list of token ids"),
        ({"token_ids": [3, "4"]}, "token_ids is no list of token ids"),
        ({"token_ids": [3, None]}, "token_ids is no list of token ids"),
        ({"token_ids": [[3], [4]]}, "token_ids is no plain list"),
        ({"token_ids": [3, [4]]}, "token_ids holds lists of several lengths"),
        ({"token_ids": None}, "it has no token_ids"),
        ({"logprobs": [-0.5]}, "logprobs has 1 entries where the tokens are 2"),
        ({"logprobs": ["-0.5", "-0.25"]}, "logprobs is no list of numbers"),
        ({"logprobs": [{}, {}]}, "logprobs is no list of numbers"),
        ({"logprobs": {"0": -0.5}}, "logprobs is no list"),
        ({"mask": [1, 2]}, "mask is no list of 0 and 1"),
        ({"step": -1}, "step is no whole number"),
        ({"step": 1.5}, "step is no whole number"),
        ({"step": 10**400}, "step is no whole number"),
        ({"temperature": "1"}, "temperature is no number"),
        ({"temperature": float("nan")}, "temperature is no number"),
        ({"temperature": 10**400}, "temperature is no number"),
        ({"group": ["a"]}, "group is neither a text nor a whole number"),
    ],
)
def test_a_column_of_another_kind_is_refused_with_its_line(log, change, reason):
    sentence = refused(log(ROW, ROW | change))
    assert "line 2 of" in sentence
    assert reason in sentence
    assert sentence.endswith("fix or remove the row")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "nests deeper than can be read"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nests deeper than can be read"),
        ('{"step": ' + "9" * 100_000 + "}", "more digits than can be read"),
        ('{"token_ids": [1], "token_ids": [2]}', "names the key 'token_ids' twice"),
        ("[1, 2]", "it holds a list, not an object"),
        ("{'a': 1}", "malformed JSON"),
    ],
)
def test_a_line_that_is_no_row_is_refused(log, line, reason):
    sentence = refused(log(ROW, line, ROW))
    assert "line 2 of" in sentence
    assert reason in sentence


@pytest.mark.parametrize("number", ["-1e400", "-1" + "0" * 400])
def test_a_number_larger_than_any_float_is_infinite_however_it_is_written(log, number):
    path = log(ROW)
    path.write_text(path.read_text().replace("-0.25", number))
    [response] = FORMATS.built_in["plain"].read(path, pytest.fail)
    assert response.log_mu.tolist() == [-0.5, float("-inf")]


@pytest.mark.parametrize("cut_line", ['{"token_ids": [1,', '{"token_ids": [1, 2]', '{"a"', "{", '{"token_ids": [1,\r'])
def test_a_cut_line_has_the_number_of_the_file_alone(log, cut_line):
    sentence = refused(log(ROW, ROW, cut_line, ROW))
    assert sentence.startswith("line 3 of")
    assert re.search(r"malformed JSON: [^()]* at column \d+\)", sentence)
    assert sentence.count("line ") == 1


def test_a_document_of_several_lines_has_the_line_of_its_fault(tmp_path):
    path = tmp_path / "log.json"
    path.write_text('{\n  "token_ids": [1, 2],\n  "logprobs" [0]\n}\n')
    with pytest.raises(UsageError, match=r"at line 3, column 14"):
        list(row.read_object(path).columns)


def test_a_line_that_is_too_long_is_not_read_to_its_end(log, monkeypatch):
    path = log(ROW, ROW | {"group": "x" * 5000})
    monkeypatch.setattr(row, "LONGEST_LINE_BYTES", 4 * 2**10)
    assert "line 2 of" in refused(path)
    assert "longer than" in refused(path)


@pytest.mark.slow
def test_a_line_of_10_gigabytes_is_refused_in_little_memory(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(ROW) + "\n{")
    os.truncate(path, 10 * 10**9)  # a sparse file: zeros that take no place
    tracemalloc.start()
    assert "line 2 of" in refused(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * row.LONGEST_LINE_BYTES
    tracemalloc.stop()
    path.write_text("{")
    os.truncate(path, 10 * 10**9)
    with pytest.raises(UsageError, match="cannot be read: a line of it is longer than 256 MiB"):
        recognise(path)


def test_a_last_line_that_is_cut_off_leaves_the_others(log):
    path = log(ROW, ROW, ROW)
    path.write_bytes(path.read_bytes()[:-20])
    findings: list[LogFinding] = []
    assert len(list(FORMATS.built_in["plain"].read(path, findings.append))) == 2
    assert [(finding.code, finding.evidence["line"]) for finding in findings] == [("half_written", 3)]


def test_a_last_line_without_its_newline_is_a_line(log):
    path = log(ROW, ROW)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(list(FORMATS.built_in["plain"].read(path, pytest.fail))) == 2


def test_text_that_is_not_utf_8_is_refused(log):
    path = log(ROW, ROW)
    path.write_bytes(path.read_bytes().replace(b"[3, 4]", b"[3,\xff4]", 1))
    assert "line 1 of" in refused(path)
    assert "not UTF-8" in refused(path)


def test_a_parquet_that_is_cut_off_is_refused(tmp_path):
    complete_bytes = next((DATA / "miles").rglob("*.parquet")).read_bytes()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(complete_bytes[: len(complete_bytes) // 2])
    assert "no readable parquet" in refused(cut, "miles")


class Harmful:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def torch_saved(path: Path, pickled: bytes, **more: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": pickled, **more}.items():
            archive.writestr(f"archive/{name}", content)
    return path


@pytest.mark.parametrize("name", ["slime", "slime_rollout", "verl", "skyrl"])
def test_a_pickle_with_code_is_never_run(name, tmp_path):
    touched = tmp_path / "touched"
    pickled = pickle.dumps({"format_version": 2, "samples": [Harmful(touched)]}, protocol=2)
    path = tmp_path / "log"
    if name == "skyrl":
        path.write_bytes(pickled)
    else:
        torch_saved(path, pickled)
    sentence = refused(path, name)
    assert "could run code" in sentence
    pickle.loads(pickled)
    assert touched.exists(), "the pickle does write where it is loaded"


@pytest.mark.parametrize(
    "names", [("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("posix", "system"), ("a\x1b[2J", "b")]
)
def test_no_name_of_a_pickle_is_looked_up(names, tmp_path):
    path = tmp_path / "log.pkl"
    path.write_bytes(b"c" + "\n".join(names).encode() + b"\n(X\x04\x00\x00\x00exittR.")
    sentence = refused(path, "skyrl")
    assert "could run code" in sentence
    assert "\x1b" not in sentence


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02}r\xff\xff\xff\xff.",
        b"\x80\x02}r\x00\x00\x00\x40.",
        b"\x80\x02}p4294967295\n.",
        b"\x80\x02}p-1\n.",
        b"\x80\x02}X\xff\xff\xff\x7fa.",
        b"\x80\x02}\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02}",
        b"\x80\x02cos\nsystem",
        b"S'\\K'\n.",
    ],
)
def test_a_pickle_that_asks_for_much_memory_is_refused_in_little(program, tmp_path):
    path = tmp_path / "log.pkl"
    path.write_bytes(program)
    tracemalloc.start()
    assert "damaged or cut-off pickle" in refused(path, "skyrl")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_is_walked_to_its_end(protocol):
    value = {"a": [1, -1, 2**40, 2**3000, 0.5, None, True, "ä\n" * 300, b"b\n" * 300, (1, 2, 3), {"b": ()}] * 100}
    value["strings"] = [f"{number}" for number in range(1000)]
    pickled = pickle.dumps(value, protocol)
    names = {"_codecs.encode": StandIn(lambda text, encoding: text.encode(encoding))}
    assert load(pickled, names) == value


ALLOWED = sorted({*skyrl.NAMES, *verl.NAMES, *TENSOR_NAMES})


@pytest.mark.parametrize("name", ALLOWED)
def test_a_pickle_cannot_change_what_an_allowed_name_means(name, tmp_path):
    """`BUILD` sets attributes of what a name means: none of ours can be changed."""
    module, _, attribute = name.rpartition(".")
    state = pickle.dumps(({}, {"__call__": 1, "_function": 1, "__class__": 1}), protocol=2)[2:-1]
    program = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + state + b"b."
    path = tmp_path / "log.pkl"
    path.write_bytes(program)
    before = {known: repr(meaning) for known, meaning in {**skyrl.NAMES, **verl.NAMES}.items()}
    assert "cannot be read" in refused(path, "skyrl")
    assert "cannot be read" in refused(torch_saved(tmp_path / "log.pt", program), "verl")
    assert {known: repr(meaning) for known, meaning in {**skyrl.NAMES, **verl.NAMES}.items()} == before


def tensor(shape: tuple, strides: tuple, offset: object = 0, numel: object = 4) -> bytes:
    """A pickle of one sample whose tokens are a tensor as given, over a storage of 4 numbers."""

    def pickled(value: object) -> bytes:
        return pickle.dumps(value, protocol=2)[2:-1]

    storage = (
        b"(" + pickled("storage") + b"ctorch\nLongStorage\n" + pickled("0") + pickled("cpu") + pickled(numel) + b"tQ"
    )
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + pickled(offset) + pickled(shape) + pickled(strides)
    made += b"\x89" + b"ccollections\nOrderedDict\n)RtR"
    sample = b"}(" + pickled("tokens") + made + pickled("response_length") + pickled(1) + b"u"
    return b"\x80\x02}(" + pickled("rollout_id") + pickled(0) + pickled("samples") + b"]" + sample + b"a" + b"u."


@pytest.mark.parametrize(
    "program",
    [
        tensor((8,), (1,)),
        tensor((4,), (1,), offset=1),
        tensor((2**40,), (0,)),
        tensor((2**20, 2**20), (0, 0)),
        tensor((4,), (-1,)),
        tensor((4,), (1, 1)),
        tensor((2**62,), (2**62,)),
        tensor((4,), (1,), offset=-1),
        tensor((5,), (1,), numel=5),
        tensor((True,), (1,)),
    ],
)
def test_a_tensor_that_is_larger_than_its_bytes_is_refused(program, tmp_path):
    path = torch_saved(tmp_path / "0.pt", program, **{"data/0": struct.pack("<4q", 1, 2, 3, 4)})
    assert "cannot be read" in refused(path, "slime_rollout")


def test_a_tensor_that_is_not_is_read(tmp_path):
    path = torch_saved(tmp_path / "0.pt", tensor((4,), (1,)), **{"data/0": struct.pack("<4q", 1, 2, 3, 4)})
    [response] = FORMATS.built_in["slime_rollout"].read(path, pytest.fail)
    assert (response.prompt_token_ids.tolist(), response.token_ids.tolist()) == ([1, 2, 3], [4])


@pytest.mark.parametrize("name", ["slime", "verl", "skyrl"])
def test_a_saved_step_that_is_cut_off_anywhere_is_refused(name, tmp_path):
    complete_bytes = FORMATS.built_in[name].sources(DATA / name)[0].path.read_bytes()
    for length in (0, 1, 10, len(complete_bytes) // 2, len(complete_bytes) - 30):
        cut = tmp_path / "log"
        cut.write_bytes(complete_bytes[:length])
        assert "cannot be read" in refused(cut, name)


@pytest.mark.slow
def test_a_compressed_archive_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x00" * 10**8)
    assert "no whole file of torch.save" in refused(path, "slime")


SAMPLES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_with_damaged_bytes_is_read_or_refused_in_a_sentence(name, tmp_path):
    rng = random.Random(name)
    complete_bytes = FORMATS.built_in[name].files(DATA / name)[0].read_bytes()
    path = tmp_path / "log"
    for _ in range(30):
        damaged = bytearray(complete_bytes)
        for _ in range(rng.choice((1, 2, 10))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        read = FORMATS.built_in[name].read_prompts if FORMATS.built_in[name].prompts else FORMATS.built_in[name].read
        with suppress(UsageError):
            list(read(path, lambda finding: None))
        with suppress(UsageError):
            recognise(path)


def test_the_name_of_an_entry_that_is_no_text_is_refused(tmp_path):
    path = torch_saved(tmp_path / "0.pt", tensor((4,), (1,)), **{"dätä": b""})
    path.write_bytes(path.read_bytes().replace("dätä".encode(), b"d\xff\xfft\xff\xff"))
    assert "no whole file of torch.save" in refused(path, "slime")


@pytest.mark.parametrize("kind", ["link", "link to a folder", "link to nothing", "pipe", "socket"])
def test_a_folder_of_a_log_holds_files_and_nothing_else(kind, tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(ROLLOUTS.read_bytes())
    other = folder / "other"
    if kind.startswith("link"):
        targets = {"link": ROLLOUTS, "link to a folder": ROLLOUTS.parent, "link to nothing": tmp_path / "nothing"}
        other.symlink_to(targets[kind])
    elif kind == "pipe":
        os.mkfifo(other)
    else:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(other))
    with pytest.raises(UsageError, match="nothing but folders and regular files is opened"):
        recognise(folder)


def test_a_pipe_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="cannot be read: it is a pipe or a device"):
        recognise(pipe)
    assert "a pipe or a device" in refused(pipe)


def test_links_of_a_tracker_are_left_alone(tmp_path):
    tracker = tmp_path / "wandb"
    tracker.mkdir()
    (tracker / "latest-run").symlink_to(tmp_path)
    (tmp_path / "rollouts.jsonl").write_bytes(ROLLOUTS.read_bytes())
    assert recognise(tmp_path).name == "plain"
