"""Experts and kept sets as a log records them, and what can be wrong with the record."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planted_logs.base import Log, Response, pick, some
from benchmarks.planted_logs.judging import Answer, Named, Planted
from benchmarks.planted_logs.logs import Plant, Pools, Random
from benchmarks.planted_logs.pools import EXPERTS, LAYERS, TAKEN
from benchmarks.planted_logs.writing import nemo_gym, plain, vllm_answers

SHARES = (0.01, 0.1, 0.6)
"""Of the tokens that a fault of single tokens hits, at each strength."""
COUNTS = (12, 30, 70)


def experts(response: Response) -> np.ndarray:
    """[tokens - 1, layers, experts of a token]"""
    return np.array(response.extra["routed_experts"])


def zero_rows(random: Random, taken: np.ndarray, level: int) -> None:
    taken[random.random(len(taken)) < SHARES[level]] = 0


def out_of_range(random: Random, taken: np.ndarray, level: int) -> None:
    hit = random.random(len(taken)) < SHARES[level]
    taken[hit, int(random.integers(1, LAYERS)), int(random.integers(TAKEN))] = 5000


def duplicate_expert(random: Random, taken: np.ndarray, level: int) -> None:
    hit = random.random(len(taken)) < SHARES[level]
    taken[hit, -1, 1] = taken[hit, -1, 0]


TOKEN_FAULTS = {
    "zero rows": (zero_rows, "experts_missing"),
    "experts out of range": (out_of_range, "experts_invalid"),
    "one expert twice": (duplicate_expert, "experts_invalid"),
}


def token_fault(name: str) -> Plant:
    change, code = TOKEN_FAULTS[name]

    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        log = some(random, pools["mixture"], int(random.integers(10, 60)))
        made, first = [], None
        for number, response in enumerate(log):
            taken = experts(response)
            before = taken.copy()
            change(random, taken, level)
            if first is None and (taken != before)[len(response.prompt) - 1 :].any():  # places of sampled tokens
                first = number + 1
            made.append(response.with_extra(routed_experts=taken.tolist()))
        write = (plain, nemo_gym, vllm_answers)[pick(random, range(3))]

        def judge(answer: Answer) -> Named:
            finding = answer.findings.get(code)
            words = finding["sentence"] if finding else answer.words[:200]
            return Named(finding is not None, f"line {first}" in words, None, f"{words}; planted in line {first}")

        return Planted(
            write(folder, made), judge, words=f"{write.__name__}, {SHARES[level]:.0%} of {len(log)} responses"
        )

    return planted


def token_shift(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    """All rows stand one token too early or too late."""
    by = (-1, 1)[pick(random, range(2))]
    made = []
    for response in some(random, pools["mixture"], COUNTS[level]):
        taken = experts(response)
        moved = np.concatenate([taken[1:], taken[-1:]]) if by < 0 else np.concatenate([taken[:1], taken[:-1]])
        made.append(response.with_extra(routed_experts=moved.tolist()))
    write = (plain, nemo_gym, vllm_answers)[pick(random, range(3))]

    def judge(answer: Answer) -> Named:
        finding = answer.findings.get("experts_shifted")
        words = finding["sentence"] if finding else answer.words[:200]
        return Named(finding is not None, ("early" if by < 0 else "late") in words, None, words)

    return Planted(write(folder, made), judge, words=f"{write.__name__}, by {by}, {COUNTS[level]} responses")


def layer_shift(moe: Path) -> Plant:
    """The experts of each layer stand in the layer before: the engine counts from the first layer that has some."""

    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        made = []
        for response in some(random, pools["mixture"], COUNTS[level]):
            taken = experts(response)
            moved = np.concatenate([taken[:, 1:], np.zeros_like(taken[:, :1])], 1)
            made.append(response.with_extra(routed_experts=moved.tolist()))

        def judge(answer: Answer) -> Named:
            finding = answer.findings.get("experts_shifted")
            words = (finding["sentence"] if finding else "") + " " + answer.words[:600] + answer.text
            return Named(finding is not None, "layer" in words, None, words[:300])

        return Planted(plain(folder, made), judge, ["--model", str(moe)], words=f"plain, {COUNTS[level]} responses")

    return planted


def kept(response: Response) -> list[list[int]]:
    sets: Any = response.extra["kept_token_ids"]
    return [list(ids) for ids in sets]


def not_in_set(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    made, first = [], None
    share = (0.003, 0.03, 0.3)[level]
    for number, response in enumerate(some(random, pools["nucleus"], int(random.integers(12, 60)))):
        sets = kept(response)
        for place in np.flatnonzero(random.random(len(sets)) < share):
            sets[place] = [token for token in sets[place] if token != response.ids[place]] or [response.ids[place] + 1]
            first = number + 1 if first is None else first
        made.append(response.with_extra(kept_token_ids=sets))
    if first is None:
        sets = kept(made[0])
        sets[0] = [made[0].ids[0] + 1]
        made[0], first = made[0].with_extra(kept_token_ids=sets), 1
    return Planted(
        plain(folder, made), kept_judge("kept_sets_broken", f"line {first}"), words=f"{share:.1%}, line {first}"
    )


def sets_shifted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    by = (-1, 1)[pick(random, range(2))]
    made = []
    for response in some(random, pools["nucleus"], COUNTS[level]):
        sets = kept(response)
        made.append(response.with_extra(kept_token_ids=[*sets[1:], sets[-1]] if by < 0 else [sets[0], *sets[:-1]]))
    word = "early" if by < 0 else "late"
    return Planted(
        plain(folder, made), kept_judge("kept_sets_broken", word), words=f"by {by}, {COUNTS[level]} responses"
    )


def not_renormalised(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    """One side's log-probs are those of the whole vocabulary: in a set of one token too they are below 0."""
    side = ("mu", "pi")[pick(random, range(2))]
    made = []
    for response in some(random, pools["nucleus"], COUNTS[level]):
        lost = np.array([np.log1p(-random.uniform(0.0005, 0.09)) for _ in response.ids])
        made.append(replace(response, **{side: getattr(response, side) + lost}))

    def judge(answer: Answer) -> Named:
        finding = answer.findings.get("kept_sets_unused")
        words = finding["sentence"] if finding else answer.words[:300]
        sides = {"mu": ("sampler", "engine", "(mu)"), "pi": ("train", "(pi)")}[side]
        return Named(finding is not None, None, any(word in words for word in sides), words)

    return Planted(plain(folder, made), judge, words=f"{side}, {COUNTS[level]} responses")


def kept_judge(code: str, place: str) -> Any:
    def judge(answer: Answer) -> Named:
        finding = answer.findings.get(code)
        words = finding["sentence"] if finding else answer.words[:300]
        return Named(finding is not None, place in words, None, f"{words}; planted: {place}")

    return judge


def sound_experts(random: Random, pools: Pools) -> Log:
    """Routers that take another expert than the trainer now and then, as rounding turns near ties."""
    made = []
    for response in some(random, pools["mixture"], int(random.integers(10, 60))):
        taken = experts(response)
        for token, layer in zip(*np.nonzero(random.random(taken.shape[:2]) < 0.05), strict=True):
            if layer:
                spare = [expert for expert in range(EXPERTS) if expert not in taken[token, layer]]
                taken[token, layer, -1] = spare[pick(random, range(len(spare)))]
        made.append(response.with_extra(routed_experts=taken.tolist()))
    return made
