"""The command lines of the documents as a reader types them: page by page, in their order, in one folder a page.

What a line names as a stand-in, as a checkpoint's folder or a log, is there under that name; a server's address is
that of a real one. The pages that a newcomer reads first run with all tests, every page by `make lines`.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from mismatch_probe.cli.first_steps import STARTERS, starter_path
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from tests.command_line import FEW as FEW_LOOKS
from tests.command_line import probe
from tests.docs.command_lines import CommandLine, command_lines
from tests.docs.pages import ROOT
from tests.docs.test_command_lines import name_floor
from tests.importing.from_run import log_of_run
from tests.importing.logs import write
from tests.servers.real_server import TAKES_WEIGHTS, WarmServer, demo_checkpoint
from tests.simulated_run import Simulation, simulated_run

PAGES_READ_FIRST: Final = ("README.md", "docs/first-five-minutes.md")
MINUTES: Final = ("--model demo",)
"""In lines of those pages that take minutes: `make demo` runs them, and `make lines`."""

STAND_INS: Final = ("/path/to/checkpoint", "CHECKPOINT", "M", "ckpt", "ckpt/12", "ckpt/step-100")
SERVER: Final = "http://rollout-"

PROMPTS: Final = [{"prompt": f"sum 1:{number} 2:{number + 3}"} for number in range(11, 267)]
FEW: Final = 4
"""Of the prompts: as many as a comparison is given that no gate judges, which takes all."""
LAST_STEP: Final = 12

ADDED: Final = {"watch": ["--idle", "0"]}
"""What is added to a command that would wait for more."""

GATED: Final = (ExitCode.PASS, ExitCode.GATE_FAILED, ExitCode.INCONCLUSIVE)
CODES: Final = {
    "gate": GATED,
    "headroom": (ExitCode.PASS, ExitCode.GATE_FAILED),
    "train": (ExitCode.PASS, ExitCode.GATE_FAILED),
    "sanity": (ExitCode.PASS, ExitCode.GATE_FAILED),
    "explain": GATED,
    "audit": GATED,
}
"""How a command ends that worked; others with 0."""

OURS: Final = [line for line in command_lines() if line.program == "mismatch-probe" and not line.needs_gpu]
FIRST: Final = [
    line for line in OURS if line.page in PAGES_READ_FIRST and not any(words in line.text for words in MINUTES)
]
PAGES: Final = list(dict.fromkeys(line.page for line in OURS))


class Reader:
    """Someone who reads a page and types its lines, in a folder that holds what the lines name."""

    def __init__(self, folder: Path, server: Callable[[], str]) -> None:
        self._folder = folder
        self._server = server
        model = folder / "path" / "to" / "checkpoint"
        shutil.copytree(demo_checkpoint(), model)
        for name in STAND_INS:
            if not name.startswith("/"):
                shutil.copytree(model, folder / name, dirs_exist_ok=True)

    def types(self, line: CommandLine) -> None:
        """
        Raises:
            AssertionError: the command does not work.
        """
        command, *words = (self._meant(word) for word in line.words[1:])
        self._prepare(command, words)
        codes = GATED if "--gate" in words else CODES.get(command, (ExitCode.PASS,))
        answer = probe(command, *words, *ADDED.get(command, ()))
        assert answer.returncode in codes, f"{line.text}: {answer.stderr}"

    def _meant(self, word: str) -> str:
        if SERVER in word:
            for number in (0, 1):
                word = word.replace(f"{SERVER}{number}:8000", self._server())
        return word.replace("/path/to", str(self._folder / "path" / "to"))

    def _prepare(self, command: str, words: list[str]) -> None:
        """What the line reads and no line before it made; what it writes is not there."""
        write(self._folder / "prompts.jsonl", PROMPTS if "--gate" in words else PROMPTS[:FEW])
        for word in words:
            path = self._folder / word
            if path.exists():
                continue
            if word in ("runs/before", "runs/after") or (word == "runs/mine" and command in ("gate", "report")):
                pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))
                simulated_run(path, Simulation(mean_length=400, pairs=pairs), with_summary=True)
            elif (command, word) == ("localize", "runs/mine"):
                self._compare(path)
            elif word == "metrics.jsonl":
                shutil.copy(ROOT / "tests" / "logs" / "metric_data" / "prime_rl.jsonl", self._folder / word)
            elif word == "logs/":
                self._write_log(path)
            elif word == "runs/theirs" and command in ("explain", "score"):
                self._write_log(self._folder / "logs")
                probe("import", "logs/", "--out", word, code=ExitCode.PASS)
            elif word in (starter.file for starter in STARTERS.values()) and command != "init":
                kind = next(kind for kind, starter in STARTERS.items() if starter.file == word)
                path.write_text(starter_path(kind).read_text(encoding="utf-8"), encoding="utf-8")
                if (command, words[0]) == ("gate", "calibrate"):
                    name_floor(path)
        if "--out" in words and "--resume" not in words:
            out = self._folder / words[words.index("--out") + 1]
            shutil.rmtree(out, ignore_errors=True)
            out.unlink(missing_ok=True)

    def _compare(self, run: Path) -> None:
        words = ["--dtype", "bf16", "--prompts", "sums:easy", "--num-prompts", "24", "--max-new-tokens", "40"]
        probe("compare", "--model", "ckpt", *words, "--config", FEW_LOOKS, "--out", run, code=ExitCode.PASS)

    def _write_log(self, folder: Path) -> None:
        """Five steps of a log, of what the checkpoint really answered."""
        run = self._folder / "logged"
        self._compare(run)
        written = log_of_run(RunDirectory(run), "bf16")
        folder.mkdir()
        for step in range(LAST_STEP - 4, LAST_STEP + 1):
            write(folder / f"step_{step}.jsonl", [row | {"step": step} for row in written])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """The address of a server of the checkpoint, started where a line asks for one."""
    with ExitStack() as stack:

        @cache
        def started() -> str:
            return stack.enter_context(WarmServer(tmp_path_factory.mktemp("server") / "log", *TAKES_WEIGHTS)).url

        yield started


@pytest.fixture
def reader(tmp_path: Path, server: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    return Reader(tmp_path, server)


@pytest.mark.slow
def test_what_a_newcomer_types_first_works(reader: Reader) -> None:
    assert {line.page for line in FIRST} == set(PAGES_READ_FIRST)
    typed: set[str] = set()
    for line in FIRST:
        words = " ".join(line.words)
        if words not in typed:
            reader.types(line)
            typed.add(words)


@pytest.mark.slow
@pytest.mark.lines
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("default")  # a reader's Python does not end at a library's warning
@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_work_one_after_the_other(page: str, reader: Reader) -> None:
    for line in OURS:
        if line.page == page:
            reader.types(line)


@pytest.mark.slow
def test_a_line_that_does_not_work_is_seen(reader: Reader) -> None:
    with pytest.raises(AssertionError, match="runs/never"):
        reader.types(CommandLine("docs/recipes.md", "mismatch-probe diff runs/before runs/never"))
