"""`localize-TRAIN-INFER.json`: where the two sides part, what each place adds, and what would mend it."""

from typing import Literal

from mismatch_probe.config.localize import LocalizeSettings
from mismatch_probe.records.summary import Record
from mismatch_probe.stats.results import Estimate

Side = Literal["infer", "train"]


class SideError(Record):
    """One side at one place, relative to what it is held against, token by token, so that each token counts alike.

    total: against the FP32 reference. own: against FP32 on what this side itself was given, which is what the place
    adds. scale: how much longer the output is than FP32 makes it, a systematic own error. cosine: with the reference.
    largest: the largest total error of one number, in root mean squares of its token.
    """

    total: Estimate
    own: Estimate
    scale: Estimate
    cosine: float
    largest: float


class PlaceError(Record):
    """A place under its names in both implementations; `layer` is None outside the decoder layers.

    between: the sides against each other, relative to the inference side; exactly 0 where they agree bit for bit.
    own_ratio: of the two own errors, each in units of its dtype's rounding, in the channel where it stands out most;
    `own_ratio_channel` is that channel (for the head, the token id) and `own_ratio_side` the worse side there.
    """

    layer: int | None
    place: str
    train_name: str
    infer_name: str | None
    infer: SideError
    train: SideError
    between: float
    own_ratio: float
    own_ratio_channel: int
    own_ratio_side: Side


class Suspect(Record):
    """A place where one side errs in another way than rounding and than the other side."""

    place: str
    layers: list[int]
    train_names: list[str]
    infer_names: list[str]
    side: Side
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
    """One part in higher precision on a side or on both, everything else as it was, on the same token ids.

    removed: share of the token KL (k3) that went away. slower: seconds of a scoring pass over those without it, less 1.
    extra_bytes: weights kept besides.
    """

    part: str
    side: Literal["infer", "train", "both"]
    kl_k3: Estimate
    removed: Estimate
    slower: float
    extra_bytes: int


class Interventions(Record):
    """Parts raised one by one, best first, and all parts of the training path together.

    sum_of_removed: what those removed one by one, added up; both are None where the training path was not tried.
    """

    ranked: list[Intervention]
    together: Intervention | None
    sum_of_removed: float | None
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
    enters: dict[Side, str]
    suspects: list[Suspect]
    routers: list[RouterDecisions]
    unmatched: list[str]
    interventions: Interventions | None
    seconds: dict[str, float]
    stored_bytes: int
    peak_memory_bytes: dict[str, int]
