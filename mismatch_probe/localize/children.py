"""A job in a process of its own, its log in a file, its failure as the error that it was."""

import json
import subprocess
import sys
from typing import Final

from mismatch_probe import errors
from mismatch_probe.errors import EngineError, OutOfMemory
from mismatch_probe.localize.workspace import JobNotes, Workspace

_LOG_LINES: Final = 3
_KILLED: Final = -9


def run_job(workspace: Workspace, job: str) -> JobNotes:
    """Run a job to its end.

    Raises:
        MismatchProbeError: what the child raised, or EngineError when it died without a word.
    """
    words = [sys.executable, "-m", f"{__package__}.worker", job, str(workspace.path)]
    with (
        workspace.log(job).open("wb") as log,
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log) as child,
    ):
        try:
            answer, _ = child.communicate()
        finally:
            child.kill()
    if child.returncode:
        raise _failure(workspace, job, answer.decode(errors="replace"), child.returncode)
    return workspace.read_notes(job)


def _failure(workspace: Workspace, job: str, answer: str, code: int) -> Exception:
    said = [line for line in answer.splitlines() if line.startswith('{"error"')]
    if said:
        found = json.loads(said[-1])
        kind: type[Exception] = getattr(errors, found["error"])
        return kind(found["message"])
    if code == _KILLED:
        return OutOfMemory(
            f"the {job} job was killed, most likely by the system for want of memory: lower --num-prompts or "
            "--max-new-tokens"
        )
    lines = [line for line in workspace.log(job).read_text(errors="replace").splitlines() if line.strip()]
    return EngineError(f"the {job} job ended with {code}: {' | '.join(lines[-_LOG_LINES:]) or 'it said nothing'}")
