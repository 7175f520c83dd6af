"""A server as the engine: what it does not say, and what was found out by asking it."""

from collections.abc import Iterator
from typing import Any, Final

from mismatch_probe.notation import write_number
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.preflight.facts import Sides

_ONE_POLICY: Final = 0.05
"""Nats by which one engine in 16 bit moves a likely token's log-prob at most when it is asked again."""
_ONE_POLICY_IN_A_CROWD: Final = 0.5
"""The same of any token among other requests, whose number decides how sums are split: a healthy server of
SmolLM2-135M in BF16 moved one by 0.21."""
_BY_CHANCE: Final = 1e-6
"""Tokens this improbable under the log-probs that came with them were drawn from another distribution."""


def server(sides: Sides) -> Iterator[SettingFinding]:
    """Nothing where the engine runs here."""
    asked = sides.infer.get("asked")
    if sides.infer.get("engine") != "server" or not isinstance(asked, dict):
        return
    yield from _sampling(sides, asked)
    yield from _identity(sides, asked)
    yield from _mixture(asked)
    yield from _noise(asked)
    if not sides.infer.get("prefill"):
        yield _finding(
            "note",
            "prefill",
            "the server was not asked for prompt log-probs, whole distributions or experts: nothing is said of "
            "decoding against prefill, of where in the context a deviation sets in, or of the exact KL",
            "Where the server has memory to spare, prefill=true asks for prompt log-probs one response at a time; they "
            "have ended production servers.",
        )


def _sampling(sides: Sides, asked: dict[str, Any]) -> Iterator[SettingFinding]:
    p_value = asked.get("sampled_as_said")
    if p_value is not None and p_value < _BY_CHANCE:
        yield _finding(
            "error",
            "asked.sampled_as_said",
            f"the server does not draw its tokens from the log-probs that it gives (p = {write_number(p_value)}): it "
            "applies a temperature, a truncation or a penalty that its log-probs do not have",
            "Find what changes sampling on the way: the server's defaults, a proxy, a logits processor.",
            Code.TEMPERATURE,
        )
    if asked.get("log_probs") is None and sides.infer.get("replay_temperature") != 1:
        yield _finding(
            "warning",
            "asked.log_probs",
            "whether the server's log-probs are those before or after temperature could not be told",
            "Sample at temperature 1, where both are the same.",
            Code.TEMPERATURE,
        )


def _identity(sides: Sides, asked: dict[str, Any]) -> Iterator[SettingFinding]:
    if sides.infer.get("dtype_known_from") != "the server":
        yield _finding(
            "note",
            "dtype",
            f"the server does not say in which dtype it computes: {sides.infer_dtype} is what the side was given",
            "Give the dtype that the server was started with: url=...,dtype=fp16.",
        )
    root, checkpoint = sides.infer.get("model_root"), None if sides.checkpoints is None else sides.checkpoints[1]
    served = [(sides.infer.get("adapter") or {}).get("folder", "")]
    served += [] if checkpoint is None else [checkpoint.folder, checkpoint.name]
    if root and checkpoint and _last(root) not in map(_last, served):
        yield _finding(
            "note",
            "model_root",
            f"the server says that it serves {root}, and this run takes {checkpoint.name}: only the log-probs show "
            "whether they are the same",
            "See that both are one checkpoint, or give the side the one it serves: url=...,checkpoint=FOLDER.",
            Code.STALE_WEIGHTS,
        )
    if not sides.infer.get("weights_are_labelled"):
        yield _finding(
            "note",
            "weight_version",
            "the server does not label its weights: that they stayed the same shows in its answer to one question "
            "that was asked again and again, which a small step of training does not change",
            "Have the trainer label each update (vLLM: /update_weight_version, SGLang: weight_version).",
            Code.STALE_WEIGHTS,
        )
    if not asked.get("echoes_prompt_ids"):
        yield _finding(
            "warning",
            "asked.echoes_prompt_ids",
            "the server does not echo the prompt's token ids, so nothing shows that it ran on those given",
            "Start vLLM with --enable-scale-out, or update the server.",
            Code.PROMPT_PREFIX,
        )
    if asked.get("refuses_unknown_ids") is False:
        yield _finding(
            "warning",
            "asked.refuses_unknown_ids",
            "the server takes a token id that the checkpoint does not have: it may serve another model",
            "Compare the vocabulary of the served model with the checkpoint's.",
            Code.STALE_WEIGHTS,
        )


def _last(path: str) -> str:
    """The last name of a folder or a hub id."""
    return path.rstrip("/").rpartition("/")[2]


def _mixture(asked: dict[str, Any]) -> Iterator[SettingFinding]:
    """Several replicas behind one address, by what they say or by answers that no single one gives."""
    processes = asked.get("processes") or 1
    again, in_a_crowd = asked.get("again") or 0.0, asked.get("in_a_crowd") or 0.0
    moved = max(again, in_a_crowd)
    is_mixture = again > _ONE_POLICY or (asked.get("processes") != 1 and in_a_crowd > _ONE_POLICY_IN_A_CROWD)
    behind = f"{processes} servers answer at this address" if processes > 1 else "what answers at this address"
    advice = 'Give each replica\'s own address, which checks and measures each: url=["http://...", "http://..."].'
    if is_mixture:
        yield _finding(
            "warning",
            "asked.again, asked.in_a_crowd",
            f"{behind} {'and give' if processes > 1 else 'gives'} one question answers that lie up to "
            f"{write_number(moved)} nats apart: replicas with other weights or settings, measured as a mixture",
            advice,
            Code.STALE_WEIGHTS,
        )
    elif processes > 1:
        yield _finding(
            "note",
            "asked.processes",
            f"{behind} and are measured as one: they answer one question alike, within {write_number(moved)} nats, as "
            "weights that are a small step of training apart do too",
            advice,
        )


def _noise(asked: dict[str, Any]) -> Iterator[SettingFinding]:
    moved = {
        "asked for a second time": asked.get("again"),
        "asked among others": asked.get("in_a_crowd"),
        "read from its prefix cache": asked.get("behind_the_cache"),
    }
    said = [f"{write_number(value)} nats when {how}" for how, value in moved.items() if value]
    if said:
        yield _finding(
            "note",
            "asked.again, asked.in_a_crowd, asked.behind_the_cache",
            f"one response of the server has other log-probs each time: by up to {', '.join(said)}",
            "No deviation smaller than this is the dtype's; vLLM: VLLM_BATCH_INVARIANT=1, SGLang: "
            "--enable-deterministic-inference.",
        )


def _finding(level: Any, setting: str, what: str, advice: str, code: Code | None = None) -> SettingFinding:
    return SettingFinding(level=level, side="mu", setting=setting, what=what, advice=advice, code=code)
