"""`manifest.json`: what was run, on what, with which settings, and how far it came."""

from typing import Any, Literal

from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.sides import InferSide, Side, TrainSide
from mismatch_probe.records.checkpoint_difference import CheckpointDifference
from mismatch_probe.records.documents import Entry
from mismatch_probe.records.log_origin import LogOrigin


class ModelIdentity(Entry):
    """The checkpoint as it was read: both sides load `folder`, nothing else.

    has_tokenizer: without one no token has a text. start_token: the id and text of the token that every text of this
    family begins with; None where there is none, or in a run made before it was looked for. sees_too: images or
    sounds besides; its text part is computed.
    """

    name: str
    folder: str
    fingerprint: str
    architecture: str
    context_length: int | None
    checkpoint_dtype: str | None
    weight_bytes: int
    has_tokenizer: bool = True
    start_token: tuple[int, str] | None = None
    sees_too: bool = False


class StageRecord(Entry):
    """One stage's progress; `effective_settings` were read back from what ran, not copied from the request.

    later_settings: how those of parts after an interruption or in an extension differed, in what changes no number.
    start_seconds: from the end of the stage before to its first batch, in which engines start and models load; None in
    a run made before it was recorded.
    """

    state: Literal["pending", "running", "done", "skipped"] = "pending"
    batches: int = 0
    batches_done: int = 0
    tokens: int = 0
    seconds: float = 0.0
    start_seconds: float | None = None
    note: str = ""
    effective_settings: dict[str, Any] = {}
    later_settings: list[str] = []

    def followed_by(self, added: "StageRecord") -> "StageRecord":
        """The record of both parts: progress adds up, and the settings that were read back first stand."""
        if added.state == "skipped":
            return self
        return added.model_copy(
            update={
                "batches": self.batches + added.batches,
                "batches_done": self.batches_done + added.batches_done,
                "tokens": self.tokens + added.tokens,
                "seconds": self.seconds + added.seconds,
                "start_seconds": added.start_seconds if self.start_seconds is None else self.start_seconds,
                "effective_settings": self.effective_settings or added.effective_settings,
                "later_settings": [*self.later_settings, *added.later_settings],
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
    """The record of a run; only the parent process writes it.

    checkpoints: of the sides that load another than the run's, by the path they name. checkpoint_differences: of every
    pair whose sides load two; none in a run made before they were recorded. environment: variables that can
    have to do with what is computed. extended_from: how many prompts the run had before each time that a gate asked for
    more. left_out: sides that the engine cannot compute, by name, each with its reason. fp16_refused: why the engine
    cannot compute in FP16, where it has a side in BF16 and none was asked for in FP16. log: what the run was imported
    from, None where its responses were sampled. growing: stages that work through the responses of added sides, each as
    it was before. run_key: another for every run, and in every leg of it; empty in a run made before there were any.
    digest: of what the numbers rest on; empty in a run made before there were any (`records.digests`).
    """

    manifest_version: int = 1
    tool_version: str
    created_at: str
    command: list[str]
    settings: CompareSettings
    model: ModelIdentity
    checkpoints: dict[str, ModelIdentity] = {}
    checkpoint_differences: list[CheckpointDifference] = []
    content_keys: dict[str, str]
    versions: dict[str, str]
    hardware: dict[str, Any]
    environment: dict[str, str] = {}
    git: dict[str, Any] | None
    run_key: str = ""
    digest: str = ""
    left_out: dict[str, str] = {}
    fp16_refused: str | None = None
    log: LogOrigin | None = None
    stages: dict[str, StageRecord] = {}
    extended_from: list[int] = []
    continued: list[Continuation] = []
    growing: dict[str, StageRecord] = {}

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
        return next((found for found in self.checkpoint_differences if (found.train, found.infer) == paths), None)
