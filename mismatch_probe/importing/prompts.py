"""The prompts of a log of texts become a prompt file, which `compare --prompts` asks again."""

import json
from pathlib import Path
from typing import Final

from mismatch_probe.logs import Format, LogFinding
from mismatch_probe.records.atomic import replacing
from mismatch_probe.records.run_directory import RunDirectory

PROMPT_FILE: Final = "prompts.jsonl"


def write_prompts(known: Format, source: Path, out: Path, findings: list[LogFinding]) -> tuple[Path, int]:
    """Write each prompt of the log once into the new folder `out`; returns the file and how many there are.

    Nothing stays behind where the log cannot be used.

    Raises:
        UsageError: the log cannot be read.
        RunDirectoryError: `out` is in use.
        StorageError: the disk refused.
    """
    folder, path, count = RunDirectory(out), out / PROMPT_FILE, 0
    with folder.created():
        try:
            with replacing(path) as file:
                for prompt in known.read_prompts(source, findings.append):
                    file.write(f"{json.dumps(prompt)}\n".encode())
                    count += 1
        except BaseException:
            folder.remove()
            raise
    return path, count
