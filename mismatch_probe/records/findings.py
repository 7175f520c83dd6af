"""The documents of `localize`, `explain`, `headroom` and `audit`, in a folder of their own or in that of a run."""

from pathlib import Path
from typing import Literal, TypeVar

from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import ExplainSettings, LoggedSide, PairSide
from mismatch_probe.errors import ExitCode, RunDirectoryError
from mismatch_probe.records.examinations import Audit, Headroom
from mismatch_probe.records.files import AUDIT_FILE, EXPLANATIONS, HEADROOM_FILE, LOCALIZATIONS, require_regular
from mismatch_probe.records.manifest import read_document, write_document
from mismatch_probe.records.summary import Record, Verdict
from mismatch_probe.stats.results import Estimate

Part = Literal["weights", "context", "distribution", "log", "format"]


class Departure(Record):
    """One thing that is otherwise than declared: the cause it is, its words, and the parameter that was fitted."""

    part: Part
    code: str
    what: str
    value: float | None = None
    declared: str = ""
    """What is declared in its place, as a clause; empty where `what` says it, and in older records."""

    @property
    def against_declared(self) -> str:
        """`temperature 0.7, where the log declares 1`."""
        return f"{self.what}, where {self.declared}" if self.declared else self.what


class Trial(Record):
    """A hypothesis that was computed."""

    departures: list[Departure]
    """None is as declared."""
    explained: float
    """The share of the square of the residual as declared that it takes away."""
    residual_floors: float
    """The root mean square of what it leaves, in units of rounding of tokens of like probability, without the largest
    hundredth.
    """
    residual_nats: float
    """Of all, in nats."""
    standard_scores: float
    """By how many standard errors its loss is below that as declared. Parameters were fitted on other tokens than they
    are judged on.
    """


class SideExplanation(Record):
    """One side of the log."""

    side: LoggedSide
    num_tokens: int
    num_missing: int
    floor_nats: float
    trials: list[Trial]
    """As declared first, then the others, best first."""
    left_out: dict[str, str] = {}
    """What could not be tried, and why."""
    explained_by: Trial | None
    """The accepted trial, None where nothing explains the side."""
    verdict: Verdict


class ExpertAgreement(Record):
    """The experts that a log records against those that the checkpoint's routers take in FP32 on the same ids, at the
    places of sampled tokens that both have.
    """

    num_responses: int
    num_places: int
    """Token and layer."""
    agreement: float
    """Share of the places with the same set of experts."""
    by_layer: dict[str, float] = {}
    """The same of each layer that has experts."""
    layer_shift: int = 0
    """By how many layers with experts the log stands too far behind, 0 where no shift explains more."""
    token_shift: int = 0
    """By how many tokens the log stands too late."""
    agreement_shifted: float | None = None
    """With these shifts undone; None without any."""


class VersionPart(Record):
    """A part of a response."""

    version: str
    """Of its weights, as `--weights` names them, or `the checkpoint`."""
    end: int
    """The part ends before this token of the response."""


class PartsOfResponse(Record):
    """A response whose weights changed, or whose record does not fit."""

    where: str
    parts: list[VersionPart]
    intervals: list[list[int]]
    """Of each change: the first and the last token that the new weights may have begun with."""
    recorded_version: str
    """The version that the log names; empty where it names none."""
    misfit: str
    """`completion` (the log names the last version for all of it), `dispatch` (the first one), `boundary` (it has the
    change at another token), `other`; empty where the record fits, or there is none.
    """


class PartsReading(Record):
    """Which of the given weights each part of each response fits, on the engine's side."""

    versions: list[str]
    """In the order in which they come."""
    num_responses: int
    num_mixed: int
    """Responses that fit several versions, one after the other."""
    num_recorded: int
    """Responses of which the log names a version."""
    num_misfits: int
    """Of these, whose record does not fit."""
    misfits: dict[str, int] = {}
    """The same by kind, as `PartsOfResponse.misfit` has it."""
    keeps_cache: bool = False
    """The later parts fit better behind the keys and values that the older weights computed."""
    responses: list[PartsOfResponse] = []
    """The first that changed or do not fit."""

    @property
    def mixed_share(self) -> float:
        return self.num_mixed / self.num_responses if self.num_responses else 0.0

    @property
    def misfit_share(self) -> float:
        return self.num_misfits / self.num_recorded if self.num_recorded else 0.0


class Explanation(Record):
    """Each logged side, and the verdict on the log: that of the side with the graver one."""

    schema_version: int = 1
    tool_version: str
    step: int | None = None
    """Of training, whose responses were looked at; None for those of the whole log."""
    settings: ExplainSettings
    model_fingerprint: str = ""
    """Of the checkpoint; empty in records made before it was kept."""
    num_responses: int
    num_tokens: int
    sides: list[SideExplanation]
    parts: PartsReading | None = None
    """None where no other weights were given, or they do not fit the engine's side."""
    experts: ExpertAgreement | None = None
    """None where the log records no experts, or the checkpoint has none that can be read."""
    verdict: Verdict
    seconds: float

    @property
    def fits_the_log(self) -> bool:
        """Whether the checkpoint explains a side, as it is declared or with a departure that is named."""
        return any(side.explained_by is not None for side in self.sides)

    @property
    def exit_code(self) -> ExitCode:
        """What `explain` ends with: data that cannot be explained because it is broken is never a pass."""
        return ExitCode.ENVIRONMENT if self.verdict.kind == "broken" else ExitCode.PASS


class SideError(Record):
    """One side at one place, relative to what it is held against, token by token, so that each token counts alike."""

    total: Estimate
    """Against the FP32 reference."""
    own: Estimate
    """Against FP32 on what this side itself was given, which is what the place adds."""
    scale: Estimate
    """How much longer the output is than FP32 makes it, a systematic own error."""
    scale_of_extra_rounding: float = 0.0
    """Of a norm: what `scale` changes by where this side rounds its numbers before it multiplies them by the weights,
    too, instead of once, or the reverse; computed of its weights and inputs. 0 elsewhere, and in older records.
    """
    cosine: float
    """With the reference."""
    largest: float
    """The largest total error of one number, in root mean squares of its token."""


class PlaceError(Record):
    """A place under its names in both implementations; `layer` is None outside the decoder layers."""

    layer: int | None
    place: str
    train_name: str
    infer_name: str | None
    infer: SideError
    train: SideError
    between: float
    """The sides against each other, relative to the inference side; exactly 0 where they agree bit for bit."""
    own_ratio: float
    """Of the two own errors, each in units of its dtype's rounding, in the channel where it stands out most;
    `own_ratio_channel` is that channel (for the head, the token id) and `own_ratio_side` the worse side there.
    """
    own_ratio_channel: int
    own_ratio_side: PairSide


class Suspect(Record):
    """A place where one side errs in another way than rounding and than the other side."""

    place: str
    layers: list[int]
    train_names: list[str]
    infer_names: list[str]
    side: PairSide
    times: float
    channel: int | None
    sentence: str


class RouterDecisions(Record):
    """Share of tokens whose set of experts differs: each side from FP32, and the sides from each other."""

    layer: int
    infer: Estimate
    train: Estimate
    sides: Estimate


class Intervention(Record):
    """One part in higher precision on a side or on both, everything else as it was, on the same token ids."""

    part: str
    side: Literal["infer", "train", "both"]
    kl_k3: Estimate
    removed: Estimate
    """Share of the token KL (k3) that went away."""
    slower: float
    """Seconds of a scoring pass over those without it, less 1."""
    extra_bytes: int
    """Weights kept besides."""


class Interventions(Record):
    """Parts raised one by one, best first, and all parts of the training path together."""

    ranked: list[Intervention]
    together: Intervention | None
    sum_of_removed: float | None
    """What those removed one by one, added up; both are None where the training path was not tried."""
    left_out: dict[str, str]


class Localization(Record):
    schema_version: int = 1
    tool_version: str
    created_at: str
    model: str
    model_fingerprint: str
    settings: LocalizeSettings
    num_sequences: int
    num_tokens: int
    looked_into_sequences: int
    looked_into_tokens: int
    kl_k3: Estimate | None
    mean_abs_diff: Estimate | None
    blocks: list[PlaceError]
    modules: list[PlaceError]
    first_difference: str | None
    enters: dict[PairSide, str]
    suspects: list[Suspect]
    routers: list[RouterDecisions]
    unmatched: list[str]
    interventions: Interventions | None
    seconds: dict[str, float]
    stored_bytes: int
    peak_memory_bytes: dict[str, int]


Document = Headroom | Localization | Explanation | Audit
_Document = TypeVar("_Document", Headroom, Localization, Explanation, Audit)


class Findings:
    """`headroom.json`, `audit.json`, `localize-TRAIN-INFER.json` for each pair of dtypes that was looked into, and
    `explain.json` or `explain-step-N.json` of a log.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exist(self) -> bool:
        paths = (self.folder / name for name in (HEADROOM_FILE, AUDIT_FILE))
        return any(path.exists() for path in paths) or bool(self._localizations())

    def headroom(self) -> Headroom | None:
        """The document; None where none is filed."""
        path = self.folder / HEADROOM_FILE
        return _read(path, Headroom) if path.exists() else None

    def audit(self) -> Audit | None:
        """As `headroom`."""
        path = self.folder / AUDIT_FILE
        return _read(path, Audit) if path.exists() else None

    def localizations(self) -> list[Localization]:
        """Of every pair of dtypes that was looked into; raises as `headroom`."""
        return [_read(path, Localization) for path in self._localizations()]

    def explanations(self) -> list[Explanation]:
        """Of a log, and of each of its steps that was explained; raises as `headroom`."""
        return [_read(path, Explanation) for path in sorted(self.folder.glob(EXPLANATIONS))]

    def documents(self) -> list[Document]:
        """All there is; raises as `headroom`."""
        singles = [document for document in (self.headroom(), self.audit()) if document is not None]
        return [*singles, *self.localizations(), *self.explanations()]

    def write(self, document: Document) -> None:
        """File a document where none of its kind is filed."""
        path = self.folder / file_name(document)
        require_absent(path)
        write_document(path, document)

    def _localizations(self) -> list[Path]:
        return sorted(self.folder.glob(LOCALIZATIONS))


def file_name(document: Document) -> str:
    """Of the file that holds a document."""
    if isinstance(document, Headroom):
        return HEADROOM_FILE
    if isinstance(document, Audit):
        return AUDIT_FILE
    if isinstance(document, Explanation):
        return explain_file(document.step)
    return localize_file(*document.settings.names)


def explain_file(step: int | None) -> str:
    return "explain.json" if step is None else f"explain-step-{step}.json"


def localize_file(train: str, infer: str) -> str:
    return f"localize-{train}-{infer}.json"


def require_absent(path: Path) -> None:
    """
    Raises:
        RunDirectoryError: the document is there; none is silently written over.
    """
    if path.exists():
        raise RunDirectoryError(f"{path} is there already: remove it to look again")


def _read(path: Path, kind: type[_Document]) -> _Document:
    require_regular(path)
    return read_document(path, kind, missing="nothing was found yet", fix="remove it and make it again")
