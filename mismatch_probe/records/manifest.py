"""The JSON documents of a run directory, and the manifest: what was run, on what, with which settings."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.sides import InferSide, Side, SideName, TrainSide
from mismatch_probe.errors import BrokenRecord, RunDirectoryError
from mismatch_probe.reading import Unreadable, as_object, parse_json, read_text
from mismatch_probe.records.files import write_text
from mismatch_probe.records.log_readings import Entry, ExpertReading, KeptReading, TurnReading, VersionReading

Model = TypeVar("Model", bound=BaseModel)


def write_document(path: Path, document: BaseModel) -> None:
    """Write a document whole or not at all."""
    write_text(path, document.model_dump_json(indent=2) + "\n")


def read_document(
    path: Path,
    kind: type[Model],
    *,
    missing: str,
    fix: str,
    check: Callable[[Mapping[str, Any]], None] = lambda content: None,
) -> Model:
    """A document of `kind`, whose first field is its version, by default the one that is read here.

    `missing` is why it may not be there, `fix` what to do about one that cannot be read. `check` gets its JSON
    values, of the same read as the document: the process that writes the file replaces it at any time.

    Raises:
        RunDirectoryError: it is not there.
        BrokenRecord: it is damaged, no document of this kind, or of another version.
    """
    try:
        text = read_text(path)
        content = as_object(parse_json(text))
        _require_version(content, kind)
        document = kind.model_validate_json(text)
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path} does not exist: {missing}") from error
    except ValidationError as error:
        raise BrokenRecord(f"{path} cannot be read ({first_problem(error)}); {fix}") from error
    except Unreadable as error:
        raise BrokenRecord(f"{path} cannot be read ({error}); {fix}") from error
    check(content)
    return document


def _require_version(content: dict[str, Any], kind: type[BaseModel]) -> None:
    name, field = next(iter(kind.model_fields.items()))
    version = content.get(name)
    if type(version) is not int or version != field.default:
        version_read = f"{name.replace('_', ' ')} {json.dumps(version)[:20]}"
        raise Unreadable(f"it has {version_read}, this version reads {field.default}")


def first_problem(error: ValidationError) -> str:
    """Where the first mistake is, and which."""
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


class TensorDifference(Entry):
    """A tensor that differs between two checkpoints."""

    name: str
    relative: float | None = None
    """Root mean square of the difference over that of the training side's tensor; None where the two have other shapes,
    or a format that is not computed with.
    """


class WeightsDifference(Entry):
    """The tensors of the training side's checkpoint against those of the engine's.

    train_alone, infer_alone: how many are in one alone.
    """

    num_tensors: int
    """Of one name in both."""
    num_other: int = 0
    """Those of them with other numbers."""
    largest: list[TensorDifference] = []
    """The few that differ most."""
    num_rounded: int = 0
    """Those that are stored in another format and are equal up to its rounding."""
    formats: tuple[str, str] | None = None
    """In which, in the training side's checkpoint and in the engine's."""
    train_alone: int = 0
    infer_alone: int = 0
    alone: list[str] = []
    """A few of their names."""
    is_sampled: bool = False
    """The checkpoints are too large to be read whole, so a part of each tensor was."""

    @property
    def are_other(self) -> bool:
        """Whether any number is another, beyond how it is stored."""
        return bool(self.num_other or self.train_alone or self.infer_alone)


class CheckpointDifference(Entry):
    """What differs between the two checkpoints of a pair of sides."""

    train: str
    """The training side's, as the side names it."""
    infer: str
    """The engine's, as the side names it."""
    weights: WeightsDifference
    config: dict[str, tuple[Any, Any]] = {}
    """Values of config.json that differ, by their dotted names, the training side's first; None is an absent one."""
    generation: dict[str, tuple[Any, Any]] = {}
    """The same of generation_config.json."""
    tokenizer: list[str] = []
    """What differs in its files, each in a few words."""
    chat_template: str = ""
    """The place where the templates begin to differ, empty where they do not."""


class LogFile(Entry):
    """A file of the log as it was read."""

    path: str
    size_bytes: int
    modified_at: str
    step: int | None = None
    complete: bool | None = None
    """What its writer says of that, None where it has no such sign."""


class LogNote(Entry):
    """Something that was seen in the log before any number was computed."""

    level: Literal["broken", "missing", "warning", "note"]
    """Broken, no number may be computed; missing, the values it names were not recorded and are left out; warning,
    numbers may mean something else than they seem to; note, they are not touched.
    """
    code: str
    sentence: str
    column: str | None = None
    """What it is about (`log_mu`, `log_pi`), None for the rows."""
    evidence: dict[str, Any] = {}


class LogOrigin(Entry):
    """Where an imported run's responses and log-probs come from.

    num_responses, num_tokens: of the whole log. analysed_responses, analysed_tokens: what the statistics are computed
    from, whole prompts chosen at random where the log is larger.
    """

    format: str
    files: list[LogFile]
    num_responses: int
    num_tokens: int
    num_sampled_tokens: int
    """Those that the policy sampled."""
    analysed_responses: int
    analysed_tokens: int
    steps_left_out: list[int] = []
    """Steps of training of which no response is analysed."""
    models: list[str] = []
    """Names that the log gives to what sampled it, without those of weight versions."""
    assumed: dict[str, str] = {}
    """What the import assumed because the log does not record it, by name."""
    turns: TurnReading | None = None
    """None where no trajectory has several turns."""
    experts: ExpertReading | None = None
    """None where the log records none."""
    kept_sets: KeptReading | None = None
    """None where the log records none."""
    versions: VersionReading | None = None
    """None where no response names a version of its weights."""
    notes: list[LogNote] = []


class ModelIdentity(Entry):
    """The checkpoint as it was read: both sides load `folder`, nothing else."""

    name: str
    folder: str
    fingerprint: str
    architecture: str
    context_length: int | None
    checkpoint_dtype: str | None
    weight_bytes: int
    has_tokenizer: bool = True
    """Without one no token has a text."""
    start_token: tuple[int, str] | None = None
    """The id and text of the token that every text of this family begins with; None where there is none, or in a run
    made before it was looked for.
    """
    sees_too: bool = False
    """Images or sounds besides; its text part is computed."""


class ImagesInPrompts(Entry):
    """The images of a run's prompts, of which both sides get the same pixels."""

    num_prompts: int
    """That hold any."""
    num_images: int
    num_tokens: int
    """Placeholders of all prompts."""
    processor: dict[str, Any]
    """Of the run's checkpoint: its class, and its settings for images."""


class StageRecord(Entry):
    """One stage's progress; `effective_settings` were read back from what ran, not copied from the request."""

    state: Literal["pending", "running", "done", "skipped"] = "pending"
    batches: int = 0
    batches_done: int = 0
    tokens: int = 0
    seconds: float = 0.0
    start_seconds: float | None = None
    """From the end of the stage before to its first batch, in which engines start and models load; None in a run made
    before it was recorded.
    """
    note: str = ""
    effective_settings: dict[str, Any] = {}
    later_settings: list[str] = []
    """How those of parts after an interruption or in an extension differed, in what changes no number."""

    def followed_by(self, other: "StageRecord") -> "StageRecord":
        """The record of both parts: progress adds up, and the settings that were read back first stand."""
        if other.state == "skipped":
            return self
        return other.model_copy(
            update={
                "batches": self.batches + other.batches,
                "batches_done": self.batches_done + other.batches_done,
                "tokens": self.tokens + other.tokens,
                "seconds": self.seconds + other.seconds,
                "start_seconds": other.start_seconds if self.start_seconds is None else self.start_seconds,
                "effective_settings": self.effective_settings or other.effective_settings,
                "later_settings": [*self.later_settings, *other.later_settings],
            }
        )


class Continuation(Entry):
    """A run taken up again: when, by which command, what had changed by then that changes no number, and which pairs
    (training side, inference side) were added, of which declared sides.
    """

    at: str
    command: list[str]
    changed: list[str]
    added: list[PairName] = []
    infer: list[InferSide] = []
    train: list[TrainSide] = []


class Manifest(Entry):
    """The record of a run; only the parent process writes it."""

    manifest_version: int = 1
    tool_version: str
    created_at: str
    command: list[str]
    settings: CompareSettings
    model: ModelIdentity
    checkpoints: dict[str, ModelIdentity] = {}
    """Of the sides that load another than the run's, by the path they name."""
    checkpoint_differences: list[CheckpointDifference] = []
    """Of every pair whose sides load two; none in a run made before they were recorded."""
    content_keys: dict[str, str]
    versions: dict[str, str]
    hardware: dict[str, Any]
    environment: dict[str, str] = {}
    """Variables that can have to do with what is computed."""
    git: dict[str, Any] | None
    run_key: str = ""
    """Another for every run, and in every leg of it; empty in a run made before there were any."""
    digest: str = ""
    """Of what the numbers rest on; empty in a run made before there were any (`records.digests`)."""
    left_out: dict[str, str] = {}
    """Sides that the engine cannot compute, by name, each with its reason."""
    fp16_refused: str | None = None
    """Why the engine cannot compute in FP16, where it has a side in BF16 and none was asked for in FP16."""
    log: LogOrigin | None = None
    """What the run was imported from, None where its responses were sampled."""
    images: ImagesInPrompts | None = None
    """None where no prompt holds any."""
    stages: dict[str, StageRecord] = {}
    extended_from: list[int] = []
    """How many prompts the run had before each time that a gate asked for more."""
    continued: list[Continuation] = []
    growing: dict[str, StageRecord] = {}
    """Stages that work through the responses of added sides, each as it was before."""
    rounding_checks: list[SideName] = []
    """Training sides whose weights are scored in FP32 and in FP64, to measure what rounding in FP32 does to them."""

    @property
    def asked_settings(self) -> CompareSettings:
        """The settings with the sides that were asked for later, begun or not."""
        settings = self.settings
        for continuation in self.continued:
            settings = settings.with_more(continuation.added, continuation.infer, continuation.train)
        return settings

    def identity_of(self, side: Side) -> ModelIdentity:
        """The checkpoint that a side loads."""
        return self.model if side.model.path == self.settings.model.path else self.checkpoints[side.model.path]

    def difference_of(self, pi: Side, mu: Side) -> CheckpointDifference | None:
        """What the checkpoints of two sides differ in; None where they load one, or where nobody compared them."""
        paths = (pi.model.path, mu.model.path)
        return next(
            (difference for difference in self.checkpoint_differences if (difference.train, difference.infer) == paths),
            None,
        )
