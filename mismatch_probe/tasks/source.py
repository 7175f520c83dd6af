"""What `--model` and a source of prompts mean: a folder, a hub id, `sums:long`, `gym:name` or a file."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_probe.config.model import DEFAULT_NUM_PROMPTS, ModelSettings, PromptSettings
from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
from mismatch_probe.errors import MissingExtra, UsageError, message_of
from mismatch_probe.host import no_collections
from mismatch_probe.provenance.checkpoint import has_tokenizer
from mismatch_probe.reading import (
    Unreadable,
    as_object,
    expand_user,
    is_folder,
    is_there,
    open_file,
    open_text_file,
    parse_json,
    require_text,
)
from mismatch_probe.tasks.problems import (
    GYM_PREFIX,
    MAX_TERMS,
    TASKS,
    ProblemSet,
    Prompt,
    PromptRow,
    TermRange,
    gym_prompts,
    to_prompt,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_jsonl(path: Path, flag: str) -> Iterator[PromptRow]:
    """One JSON object a line; blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, or a line is no JSON object.
    """
    try:
        with open_text_file(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(path, number, line)
    except (FileNotFoundError, Unreadable) as error:
        raise _unreadable(path, flag, error) from error


def read_parquet(path: Path, flag: str) -> Iterator[PromptRow]:
    """One row of the table a prompt; batches are read as they are needed.

    Raises:
        UsageError: the file cannot be read or is no parquet.
    """
    try:
        with open_file(path) as file:
            for number, columns in enumerate(_table_rows(path, file)):
                yield PromptRow(f"row {number} of {path}", columns, path.parent)
    except (FileNotFoundError, Unreadable) as error:
        raise _unreadable(path, flag, error) from error


def _table_rows(path: Path, file: IO[bytes]) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompt file {path} is no readable parquet: {message_of(error)}") from error


READERS: dict[str, Callable[[Path, str], Iterator[PromptRow]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}


def _parse_line(path: Path, number: int, line: str) -> PromptRow:
    where = f"line {number} of {path}"
    try:
        columns = as_object(parse_json(line))
        require_text(json.dumps(columns, ensure_ascii=False))
    except Unreadable as error:
        raise UsageError(f"{where} cannot be read ({error}); fix or remove it") from error
    return PromptRow(where, columns, path.parent)


def _unreadable(path: Path, flag: str, error: Exception) -> UsageError:
    reason = "it does not exist" if isinstance(error, FileNotFoundError) else error
    return UsageError(f"prompt file {path} cannot be read ({reason}); fix it, or give {flag} another")


HUB_PREFIX = "hub:"


def read_hub(source: str, flag: str) -> Iterator[PromptRow]:
    """The rows of one split (`train` unless named); a local folder of data files works as well as a hub id.

    `flag` is what named it.

    Raises:
        MissingExtra: `datasets` is not installed.
        UsageError: the data set or the split cannot be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra(
            f"prompt source {source} needs the package datasets, which is not installed; "
            "run `pip install 'mismatch-probe[datasets]'`"
        ) from error
    name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise UsageError(f"prompt source {source!r} names no data set; give {flag} {HUB_PREFIX}OWNER/NAME[:SPLIT]")
    try:
        data = load_dataset(name, split=split or "train", streaming=True)
        for number, columns in enumerate(data):
            yield PromptRow(f"row {number} of {source}", columns)
    except (ValueError, OSError, LookupError) as error:
        raise UsageError(
            f"prompt source {source} cannot be loaded ({message_of(error)}); "
            f"give {flag} {HUB_PREFIX}OWNER/NAME:SPLIT of a data set that can be reached"
        ) from error


DEFAULT_SPLIT = "medium"
TERMS_KEY = "terms="


@dataclass(frozen=True)
class Asking:
    """How a command asks for prompts: with which flags, and for how many where no number is given.

    made: of a task that makes them. held: of a source that has them, or all of a smaller one; None: all of any.
    """

    flag: str = "--prompts"
    count_flag: str = "--num-prompts"
    default_made: int = DEFAULT_NUM_PROMPTS
    default_held: int | None = DEFAULT_NUM_PROMPTS


COMPARING: Final = Asking()


def load_prompts(
    settings: PromptSettings, seed: int = 0, asking: Asking = COMPARING, *, takes_images: bool = False
) -> list[Prompt]:
    """The first `settings.num_prompts` prompts of the source, in its order, or, unset, as many as `asking` says.

    `seed` makes the problems of tasks that make them. takes_images: of the caller, for prompts that hold some.

    Raises:
        UsageError: the source does not exist, is malformed, holds fewer prompts than asked for, or images that the
            caller does not take.
        MissingExtra: a hub data set or a task of reasoning-gym is asked for, and its package is not installed.
    """
    num_made, num_held = settings.num_prompts or asking.default_made, settings.num_prompts or asking.default_held
    if settings.source.partition(":")[0] in TASKS:
        problems = parse_problem_set(settings.source, seed, asking.flag)
        return [_problem_prompt(problems, index) for index in range(num_made)]
    if settings.source.startswith(GYM_PREFIX):
        return gym_prompts(settings.source, num_made, seed)
    rows = islice(_rows(settings.source, asking.flag), num_held)
    prompts = [to_prompt(f"row-{index}", row) for index, row in enumerate(rows)]
    if not prompts:
        raise UsageError(
            f"prompt source {settings.source} is empty; give {asking.flag} a source with at least one prompt"
        )
    with_image = next((prompt for prompt in prompts if prompt.images), None)
    if with_image is not None and not takes_images:
        raise UsageError(f"{with_image.label} holds an image, and compare alone takes images; give prompts of text")
    if settings.num_prompts is not None and len(prompts) < settings.num_prompts:
        raise UsageError(
            f"prompt source {settings.source} holds {len(prompts)} prompts, fewer than the {settings.num_prompts} "
            f"asked for; give {asking.count_flag} {len(prompts)}, or leave it out to use what there is"
        )
    return prompts


def num_held(source: str, most: int) -> int | None:
    """How many prompts a source has, counted up to `most`; None for one that makes as many as are asked for.

    Raises:
        UsageError: the source does not exist or is malformed.
        MissingExtra: a hub data set is asked for, and its package is not installed.
    """
    if source.partition(":")[0] in TASKS or source.startswith(GYM_PREFIX):
        return None
    return sum(1 for _ in islice(_rows(source, COMPARING.flag), most))


def parse_problem_set(source: str, seed: int, flag: str) -> ProblemSet:
    """The problems that `TASK`, `TASK:SPLIT`, `TASK:terms=N` or `TASK:terms=N-M` names; `TASK` is its medium split.

    `flag` is what named it.

    Raises:
        UsageError: no such split or parameter, or a number of terms out of range.
    """
    task_name, _, selection = source.partition(":")
    task = TASKS[task_name]
    split = selection or DEFAULT_SPLIT
    if split in task.splits:
        return ProblemSet(task, task.splits[split], seed)
    if split.startswith(TERMS_KEY):
        return ProblemSet(task, _parse_terms(source, split.removeprefix(TERMS_KEY)), seed)
    raise UsageError(
        f"prompt source {source!r}: {task.name} has no split {split!r}; give {flag} {task.name}:SPLIT with one of "
        f"{', '.join(task.splits)}, or {task.name}:{TERMS_KEY}N"
    )


def _rows(source: str, flag: str) -> Iterator[PromptRow]:
    if source.startswith(HUB_PREFIX):
        return read_hub(source, flag)
    try:
        path = expand_user(source)
    except Unreadable as error:
        raise UsageError(f"prompt source {source!r} cannot be read ({error}); give {flag} another path") from error
    if path.suffix in READERS:
        return READERS[path.suffix](path, flag)
    if source and is_there(path) and (path.is_dir() or path.is_file()):
        kind = "a folder" if path.is_dir() else "a file that ends in neither .jsonl nor .parquet"
        raise UsageError(
            f"prompt source {source!r} is {kind}; give {flag} a .jsonl file with a line "
            '{"prompt": "..."} for each prompt, or a .parquet file with a column prompt'
        )
    raise UsageError(
        f"prompt source {source!r} is unknown; give {flag} a built-in task ({', '.join(TASKS)}), "
        f"a {' or '.join(READERS)} file, {HUB_PREFIX}OWNER/NAME[:SPLIT], or {GYM_PREFIX}NAME"
    )


def _parse_terms(source: str, value: str) -> TermRange:
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", value, flags=re.ASCII)
    if match is not None:
        terms = TermRange(int(match[1]), int(match[2] or match[1]))
        if 2 <= terms.low <= terms.high <= MAX_TERMS:
            return terms
    raise UsageError(
        f"prompt source {source!r}: {TERMS_KEY}{value} cannot be used; "
        f"give {TERMS_KEY}N or {TERMS_KEY}N-M within 2-{MAX_TERMS}"
    )


def _problem_prompt(problems: ProblemSet, index: int) -> Prompt:
    problem = problems.problem(index)
    task = problems.task.name
    return Prompt(f"{task}-{index}", text=problem.question, answer=problem.answer, task=task)


DEMO_MODEL: Final = "demo"
_HUB_OPENING: Final = "Got: "
"""With which huggingface_hub begins what it met."""
_CHECKPOINT_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
_OTHER_LAYOUTS: Final = ["consolidated*.safetensors", "original/*", "metal/*"]
"""The same weights once more, for other programs."""


def resolve_model(model: ModelSettings, flag: str = "--model") -> Path:
    """The folder of the checkpoint; that of a hub id is downloaded, or found in the hub's cache. flag: what named it.

    Raises:
        UsageError: a file, a folder that is absent, a revision of a folder, or a hub id that cannot be had.
        MissingExtra: a hub id is given and huggingface_hub is not installed.
    """
    ways = f"give {flag} a checkpoint's folder, a hub id, or {DEMO_MODEL!r}"
    if not model.path.strip():
        raise UsageError(f"the model has no name; {ways}")
    try:
        folder = DEMO_CHECKPOINT if model.path == DEMO_MODEL else expand_user(model.path)
    except Unreadable as error:
        raise UsageError(f"model {model.path} cannot be read ({error}); {ways}") from error
    if is_folder(folder):
        if model.revision is not None:
            raise UsageError(f"model {model.path} is a folder, which has no revisions; leave --revision out")
        _require_files(folder)
        return folder
    if is_there(folder):
        raise UsageError(f"model {model.path} is a file, not a folder; {ways}")
    if folder.is_absolute() or model.path.startswith(".") or len(folder.parts) > 2:
        raise UsageError(f"model folder {model.path} does not exist; {ways}")
    return _download(model, ways)


def load_tokenizer(folder: str | Path, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The checkpoint's tokenizer.

    Raises:
        UsageError: the folder holds none, or one that cannot be read.
        MissingExtra: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _missing("transformers", "a tokenizer") from error
    try:
        with no_collections():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file raises whatever its parser meets
        raise _no_tokenizer(folder, message_of(error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise _no_tokenizer(folder, "it has no vocabulary")
    return tokenizer


def tokenizer_for(
    prompts: Sequence[Prompt], folder: str | Path, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase | None":
    """The checkpoint's tokenizer; None where it has none and all prompts are token ids, which need none."""
    if not has_tokenizer(Path(folder)) and all(prompt.token_ids is not None for prompt in prompts):
        return None
    return load_tokenizer(folder, trust_remote_code=trust_remote_code)


def _require_files(folder: Path) -> None:
    """Readers of checkpoints wait for ever at a pipe."""
    odd = next((path for path in folder.iterdir() if is_there(path) and not (path.is_file() or path.is_dir())), None)
    if odd is not None:
        raise UsageError(f"{odd} is a pipe, a socket or a device, not a file: give --model an intact checkpoint")


def _download(model: ModelSettings, ways: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise _missing("huggingface_hub", "a model of the hub") from error
    try:
        return Path(
            snapshot_download(
                model.path, revision=model.revision, allow_patterns=_CHECKPOINT_FILES, ignore_patterns=_OTHER_LAYOUTS
            )
        )
    except (OSError, ValueError) as error:
        why = message_of(error).removeprefix(_HUB_OPENING)
        raise UsageError(
            f"model {model.path} is no folder here and cannot be had from the hub ({why}); {ways}"
        ) from error


def _no_tokenizer(folder: str | Path, reason: str) -> UsageError:
    return UsageError(
        f"the tokenizer of {folder} cannot be loaded ({reason}); give --model a folder with the tokenizer's files "
        "beside config.json"
    )


def _missing(package: str, purpose: str) -> MissingExtra:
    return MissingExtra(
        f"{purpose} needs the package {package}, which is not installed; run `pip install 'mismatch-probe[training]'`"
    )
