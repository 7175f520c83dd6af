"""What a command answered, and what of it accuses somebody."""

import io
import json
import logging
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy.stats import beta

from mismatch_probe.__main__ import run as run_command


@dataclass(frozen=True)
class Answer:
    """Of one command: its exit code, its JSON document, what the run directory records of the log, its text."""

    exit_code: int
    document: dict[str, Any]
    log: dict[str, Any]
    text: str

    @property
    def findings(self) -> dict[str, dict[str, Any]]:
        return {note["code"]: note for note in self.log.get("notes", [])}

    @property
    def verdict(self) -> dict[str, Any]:
        return self.document.get("verdict") or {"code": "", "kind": "", "sentence": "", "evidence": [], "also": []}

    @property
    def causes(self) -> list[str]:
        """The verdict's cause and those that hold as well, where these are bugs or broken data."""
        also = [cause if isinstance(cause, str) else cause["code"] for cause in self.verdict["also"]]
        return [*([self.verdict["code"]] if self.verdict["kind"] in ("bug", "broken") else []), *also]

    @property
    def words(self) -> str:
        """Headline, sentence, evidence and findings of levels above a note."""
        accused = [note["sentence"] for note in self.log.get("notes", []) if note["level"] != "note"]
        headline = self.document.get("headline", "")
        return "\n".join([str(headline), self.verdict["sentence"], *self.verdict["evidence"], *accused])


def ask(folder: Path, *arguments: str | Path) -> Answer:
    """Run `mismatch-probe ... --json` in this process; `folder` is the run directory that is read back."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = int(run_command([*map(str, arguments), "--json"]) or 0)
        except SystemExit as ended:
            code = int(ended.code or 0)
    logging.captureWarnings(False)
    document = json.loads(out.getvalue()) if out.getvalue().strip().startswith("{") else {}
    manifest = folder / "manifest.json"
    log = json.loads(manifest.read_text(encoding="utf-8")).get("log") or {} if manifest.exists() else {}
    return Answer(code, document, log, err.getvalue())


@dataclass(frozen=True)
class Named:
    """Whether an answer names what was planted; None where a part has no meaning for it."""

    cause: bool
    place: bool | None = None
    side: bool | None = None
    words: str = ""

    @property
    def all(self) -> bool:
        return self.cause and self.place is not False and self.side is not False


Judge = Callable[[Answer], Named]


@dataclass(frozen=True)
class Planted:
    """A source, the arguments of the command that reads it, and how its answer is judged."""

    source: Path
    judge: Judge
    arguments: list[str] = field(default_factory=list)
    words: str = ""
    """What was planted, and where."""
    run: Callable[[], Named] | None = None
    """In place of an import: commands of its own, and what they named."""


HINTS = re.compile(r"at once|changes? within|every \d+ places|place \d+ of the context|grew|grows|steps? up|shifted")


def accusations(answer: Answer, *, has_sets: bool = False) -> list[str]:
    """What an answer says against a log: findings of levels above a note, bugs, hints in the evidence, growth."""
    accused = [note["code"] for note in answer.log.get("notes", []) if note["level"] != "note"]
    if not has_sets:  # with no set of what a token was drawn from, zeros on both sides are a question and no accusation
        accused = [code for code in accused if code != "zeros_untold"]
    accused += answer.causes
    accused += [f"hint: {line[:160]}" for line in answer.verdict["evidence"] if HINTS.search(line)]
    accused += ["growth" for pair in answer.document.get("pairs", []) if pair.get("growth")]
    accused += [
        f"change of level: {side}" for side in ["versions"] if (answer.log.get(side) or {}).get("is_level_changed")
    ]
    if answer.exit_code not in (0, 3):
        accused.append(f"exit code {answer.exit_code}: {answer.text.strip().splitlines()[-1:]}")
    return accused


def binomial(named: int, planted: int) -> tuple[float, float]:
    """The exact 95 % interval of a share (Clopper and Pearson, 1934)."""
    low = beta.ppf(0.025, named, planted - named + 1) if named else 0.0
    high = beta.ppf(0.975, named + 1, planted - named) if named < planted else 1.0
    return float(low), float(high)
