"""What a server's side ran with: what it was asked with, what it says of itself, what was found out."""

from contextlib import suppress
from typing import Any

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.server.asking import UNLABELLED, Findings
from mismatch_probe.engines.server.contact import Contact
from mismatch_probe.errors import UsageError


def effective_settings(
    dtype: Dtype,
    engine: EngineSettings,
    sampling: SamplingSettings,
    met: Contact,
    findings: Findings,
    standing: dict[str, float],
    *,
    says_what_it_holds: bool | None,
) -> dict[str, Any]:
    """Plain JSON values. `asked` and `standing_answer` are measured anew by each process. says_what_it_holds: whether a
    server that is sent weights says the digests of those that it holds; None of one that is not sent any.
    """
    full_support = sampling.top_p == 1.0 and sampling.top_k == 0
    is_whole = full_support and sampling.temperature == 1.0
    said = _dtype(met.dtype)
    mode = {"before temperature": "raw_logprobs", "after temperature": "processed_logprobs"}.get(
        findings.log_probs or ""
    )
    return {
        "engine": "server",
        "url": engine.args["url"],
        "software": met.software,
        "protocol": met.protocol.path,
        "model": met.model,
        "model_root": met.root,
        "max_model_len": met.max_model_len,
        "dtype": said or dtype,
        "dtype_known_from": "the server" if said else "the side's own words",
        "weight_version": findings.weight_version,
        "weights_are_labelled": findings.weight_version not in (None, UNLABELLED),
        "logprobs_mode": None if is_whole else mode,
        "decode_support": "full vocabulary" if full_support else "kept by top_p and top_k, renormalised",
        "replay_support": "full vocabulary" if engine.prefill else None,
        "replay_temperature": sampling.temperature,
        "prefill": engine.prefill,
        "prefix_caching": engine.prefix_caching,
        "adapter": engine.adapter,
        "transfer": engine.args.get("transfer"),
        "says_what_it_holds": says_what_it_holds,
        "asked": findings.to_json(),
        "standing_answer": standing,
    }


def _dtype(text: str | None) -> Dtype | None:
    with suppress(UsageError):
        return None if text is None else Dtype.parse(text)
    return None
