"""Responses whose sampler records its experts and the sets that it drew from, drawn at random."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mismatch_probe.records.sequences import IntArray, KeptSets, LoggedResponse

NUM_EXPERTS = 16
VOCABULARY = 300


def text(random: np.random.Generator, count: int) -> IntArray:
    """Ids that come again as those of a language do."""
    return np.minimum(random.zipf(1.3, count) - 1, VOCABULARY - 1).astype(np.int32)


def with_experts(
    seed: int, *, responses: int = 24, layers: int = 6, dense: int = 0, chosen: int = 4, by_context: float = 0.4
) -> list[LoggedResponse]:
    """Routers that follow the token, but for a share that follows what is before it; dense layers have zeros."""
    random = np.random.default_rng(seed)
    tables = _choices(random, layers - dense, VOCABULARY, chosen)
    log = []
    for number in range(responses):
        prompt, response = text(np.random.default_rng(number // 4), 12), text(random, 60)
        ids = np.concatenate([prompt, response])
        experts = np.zeros((ids.size, layers, chosen), np.int32)
        is_by_context = random.random((layers - dense, ids.size, 1)) < by_context
        taken = np.where(is_by_context, _choices(random, layers - dense, ids.size, chosen), tables[:, ids])
        experts[:, dense:] = taken.transpose(1, 0, 2)
        log.append(
            LoggedResponse(
                where=f"line {number + 1}",
                prompt_token_ids=prompt,
                token_ids=response,
                sampled=np.ones(response.size, np.bool_),
                log_mu=-random.exponential(1.0, response.size) - 1e-3,
                experts=experts[:-1],
            )
        )
    return log


def _choices(random: np.random.Generator, layers: int, tokens: int, chosen: int) -> IntArray:
    """Different experts for each token of each layer [L, T, K]."""
    return random.random((layers, tokens, NUM_EXPERTS)).argsort(axis=2)[:, :, :chosen].astype(np.int32)


def with_sets(
    seed: int, *, responses: int = 8, top_p: float = 0.8, renormalised: Sequence[str] = ("log_mu", "log_pi")
) -> list[LoggedResponse]:
    """Tokens drawn by top-p of random distributions; a column that is not renormalised has the whole vocabulary's."""
    random = np.random.default_rng(seed)
    log = []
    for number in range(responses):
        ids, sets, logprobs, columns = [], [], [], {"log_mu": [], "log_pi": []}
        for _ in range(50):
            logits = random.normal(0, random.choice([1.0, 4.0, 9.0]), VOCABULARY)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            order = np.argsort(-p)
            kept = order[: int((np.cumsum(p[order]) < top_p).sum()) + 1]
            token = int(random.choice(kept, p=p[kept] / p[kept].sum()))
            ids.append(token)
            sets.append(kept)
            logprobs.append(np.log(p[kept] / (p[kept].sum() if "log_mu" in renormalised else 1)))
            for name, column in columns.items():
                noise = random.normal(0, 1e-3) if name == "log_pi" and kept.size > 1 else 0.0
                column.append(np.log(p[token] / (p[kept].sum() if name in renormalised else 1)) + noise)
        log.append(
            LoggedResponse(
                where=f"line {number + 1}",
                prompt_token_ids=text(random, 5),
                token_ids=np.array(ids, np.int32),
                sampled=np.ones(len(ids), np.bool_),
                log_mu=np.minimum(columns["log_mu"], 0.0),
                log_pi=np.minimum(columns["log_pi"], 0.0),
                kept=KeptSets(
                    np.concatenate(sets).astype(np.int32),
                    np.cumsum([len(each) for each in sets]),
                    np.concatenate(logprobs),
                ),
            )
        )
    return log


def shifted_rows(response: LoggedResponse, by: int) -> LoggedResponse:
    """Its experts stand so many tokens too late."""
    assert response.experts is not None
    return replace(response, experts=np.roll(response.experts, by, axis=0))


def shifted_sets(response: LoggedResponse, by: int) -> LoggedResponse:
    """Its sets stand so many tokens too late."""
    assert response.kept is not None
    sets = np.split(response.kept.ids, response.kept.ends[:-1])
    moved = [sets[(place - by) % len(sets)] for place in range(len(sets))]
    return replace(
        response, kept=KeptSets(np.concatenate(moved), np.cumsum([each.size for each in moved], dtype=np.int64))
    )


def rows_of(log: Sequence[LoggedResponse]) -> list[dict[str, Any]]:
    """The plain lines of responses."""
    rows: list[dict[str, Any]] = []
    for response in log:
        row: dict[str, Any] = {
            "prompt_token_ids": response.prompt_token_ids.tolist(),
            "token_ids": response.token_ids.tolist(),
            "logprobs": np.asarray(response.log_mu).tolist(),
        }
        if response.experts is not None:
            row["routed_experts"] = response.experts.tolist()
        if response.kept is not None:
            row["kept_token_ids"] = [part.tolist() for part in np.split(response.kept.ids, response.kept.ends[:-1])]
        rows.append(row)
    return rows
