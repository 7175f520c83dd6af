"""Faults in a log of both sides: heads, mask edges, periods, onsets, a side's own noise, weights that change."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planted_logs.base import Floats, Log, Response, by_prompt, pick, some
from benchmarks.planted_logs.judging import Answer, Judge, Named, Planted
from benchmarks.planted_logs.writing import BOTH_SIDES, plain

Random = np.random.Generator
Pools = dict[str, Log]
Plant = Callable[[Random, Pools, Path, int], Planted]


MODELS = ("demo", "smollm2")


def drawn(random: Random, pools: Pools, least: int, most: int, names: tuple[str, ...] = MODELS) -> Log:
    return some(random, pools[names[pick(random, range(len(names)))]], int(random.integers(least, most + 1)))


def rms(log: Log) -> float:
    return float(np.sqrt(np.nanmean(np.concatenate([response.pi - response.mu for response in log]) ** 2)))


def changed(response: Response, side: str, values: Floats) -> Response:
    return replace(response, mu=values) if side == "mu" else replace(response, pi=values)


# 2: heads and masks


def constant_head(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    """A prefix that the engine read as its prompt begins each completion; its log-probs: none, or those of a prompt."""
    log = drawn(random, pools, (10, 30, 80)[level], (14, 50, 150)[level])
    size = (1, 3, 8)[level]
    write = BOTH_SIDES[pick(random, range(3))]
    scored = level > 0 and random.random() < 0.4
    head = random.integers(5, 60, size).tolist()
    made = []
    for response in log:
        rare = np.minimum(-random.gamma(3.0, 3.0, size), -1.2)
        made.append(
            replace(
                response, ids=[*head, *response.ids],
                mu=np.concatenate([rare + 0.02 * random.normal(size=size) if scored else rare * np.nan, response.mu]),
                pi=np.concatenate([rare, response.pi]),
            )
        )  # fmt: skip

    return Planted(
        write(folder, made),
        judge_head(size),
        words=f"{write.__name__}, {size} tokens, {len(log)} responses, scored {scored}",
    )


def judge_head(size: int) -> Judge:
    def judge(answer: Answer) -> Named:
        finding = answer.findings.get("constant_head")
        words = finding["sentence"] if finding else answer.words[:200]
        counted = [int(number.replace(",", "")) for number in re.findall(r"\b[\d,]*\d\b", words)]
        named = {"one": 1, "two": 2, "three": 3, "eight": 8}
        counted += [value for word, value in named.items() if word in words]
        return Named(finding is not None, finding is not None and (size in counted or size == 1), None, words)

    return judge


EDGES = ("begins early", "begins late", "ends early", "ends late")


def with_tools(random: Random, pool: Log, missing: float) -> Response:
    """Header, sampled, tool, sampled, and what the template writes at the end; only sampled tokens are in the mask."""
    first, second, tool = (response.cut(int(random.integers(6, 60))) for response in some(random, pool, 3))
    extra = [some(random, pool, 1)[0].cut(int(random.integers(1, 4))) for _ in range(2)]
    parts = [extra[0], first, tool, second, extra[1]]
    sampled = [0, 1, 0, 1, 0]
    mu = [part.mu if mine else np.full(len(part.ids), missing) for part, mine in zip(parts, sampled, strict=True)]
    return Response(
        first.prompt, [*chain(*(part.ids for part in parts))], np.concatenate(mu),
        np.concatenate([part.pi for part in parts]),
        [mine for part, mine in zip(parts, sampled, strict=True) for _ in part.ids],
    )  # fmt: skip


def moved_edges(mask: list[int], edge: str) -> list[int]:
    """Each stretch of a mask with one of its edges a token off, where the row has a token there."""
    moved = np.array(mask)
    steps = np.diff(moved, prepend=0, append=0)
    begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    places = {"begins early": begins - 1, "begins late": begins, "ends early": ends - 1, "ends late": ends}[edge]
    places = places[(places >= 0) & (places < moved.size)]
    moved[places] = 1 if edge in ("begins early", "ends late") else 0
    return [int(value) for value in moved]


def judge_edge(edge: str) -> Judge:
    def judge(answer: Answer) -> Named:
        finding = answer.findings.get("mask_edge")
        words = finding["sentence"] if finding else answer.words[:200]
        place = all(word[:3] in words for word in edge.split())
        return Named(finding is not None and finding["level"] != "note", place, None, words)

    return judge


def mask_edge(edge: str) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        write = BOTH_SIDES[pick(random, range(3))]
        pool = pools[("demo", "smollm2")[pick(random, range(2))]]
        count = int(random.integers((8, 24, 80)[level], (13, 49, 161)[level]))
        log = [with_tools(random, pool, np.nan if write is plain else 0.0) for _ in range(count)]
        made = []
        for response in log:
            made.append(replace(response, mask=moved_edges(response.mask or [], edge)))

        return Planted(write(folder, made), judge_edge(edge), words=f"{write.__name__}, {edge}, {count} responses")

    return planted


# 3: places


def judge_places(code: str, numbers: list[list[int]], side: str, *, on_data: bool = False) -> Callable[[Answer], Named]:
    def judge(answer: Answer) -> Named:
        words = answer.verdict["sentence"]
        named = answer.verdict["code"] == code or any(code in str(cause) for cause in answer.verdict["also"])
        numbers_in_words = [
            int(number.replace(",", ""))
            for number in re.findall(r"\d[\d,]*", " ".join([words, *answer.verdict["evidence"]]))
        ]
        place = all(any(value in numbers_in_words for value in values) for values in numbers)
        sides = {"mu": ("engine", "(mu)"), "pi": ("training path", "trainer", "(pi)")}[side]
        right = None if words.startswith("One side") else any(word in words for word in sides)
        return Named(named, place, right, " / ".join([words, *answer.verdict["evidence"]])[:400])

    return judge


def long_ones(random: Random, pool: Log, count: int) -> Log:
    """The longest contexts among twice as many."""
    return sorted(some(random, pool, 2 * count), key=lambda response: -len(response.prompt) - len(response.ids))[:count]


LONGEST = 512


def of_prompt(seed: int, response: Response) -> Random:
    """What goes wrong goes wrong alike in siblings, while these are alike."""
    return np.random.default_rng([seed, *response.prompt])


def off(seed: int, response: Response, hit: Floats, side: str, size: float) -> Response:
    """A side's log-prob falls at these tokens, the further the less sure the token is, in one of five it rises."""
    random = of_prompt(seed, response)
    values = getattr(response, side)
    sure = np.exp(response.mu)
    signs = np.where(random.random(LONGEST) < 0.2, 0.5, -1.0)
    error = size * (signs * (0.5 + random.gamma(2.0, 0.5, LONGEST)))[: len(hit)] * (1 - sure)
    return changed(response, side, np.minimum(np.where(hit, values + error, values), -1e-7))


TIMES = (6.0, 20.0, 80.0)
"""How far off a token is, in rms of d, at each strength."""
NEAR = 4
"""Places that a step is named early or late at most."""


@dataclass(frozen=True)
class FaultyLog:
    """A log whose side is off at places of the context, and what these places are."""

    log: Log
    side: str
    numbers: tuple[int, ...]
    """Block and phase, or the first place."""
    words: str


def with_period(random: Random, pools: Pools, level: int, names: tuple[str, ...] = MODELS) -> FaultyLog:
    side, name = ("mu", "pi")[pick(random, range(2))], names[pick(random, range(len(names)))]
    log = long_ones(random, pools[name], int(random.integers(30, 80)))
    longest = max(int(response.places[-1]) for response in log)
    block = pick(random, [size for size in (16, 24, 32, 48, 64) if 4 * size <= longest])
    phase, size = int(random.integers(block)), TIMES[level] * rms(log)
    seed = int(random.integers(2**31))
    made = [off(seed, response, response.places % block == phase, side, size) for response in log]
    words = f"{side}, {name}, every {block} from {phase}, {size:.2g} nats, {len(log)} responses"
    return FaultyLog(made, side, (block, phase), words)


def with_step(random: Random, pools: Pools, level: int, names: tuple[str, ...] = MODELS) -> FaultyLog:
    side, name = ("mu", "pi")[pick(random, range(2))], names[pick(random, range(len(names)))]
    log = long_ones(random, pools[name], int(random.integers(20, 60)))
    ends = np.sort([int(response.places[-1]) for response in log])
    begins = np.sort([int(response.places[0]) for response in log])
    low, high = int(np.median(begins)) + 12, int(np.median(ends)) - 12
    place, size = int(random.integers(low, high)), (4.0, 12.0, 50.0)[level] * rms(log)
    seed = int(random.integers(2**31))
    made = [off(seed, response, response.places >= place, side, size) for response in log]
    words = f"{side}, {name}, from place {place}, {size:.2g} nats, {len(log)} responses"
    return FaultyLog(made, side, (place,), words)


def period(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    made = with_period(random, pools, level)
    write = BOTH_SIDES[pick(random, range(3))]
    judge = judge_places("period", [[number] for number in made.numbers], made.side)
    return Planted(write(folder, made.log), judge, words=f"{write.__name__}, {made.words}")


def onset(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    made = with_step(random, pools, level)
    write = BOTH_SIDES[pick(random, range(3))]
    near = list(range(made.numbers[0] - NEAR, made.numbers[0] + NEAR + 1))
    return Planted(
        write(folder, made.log), judge_places("onset", [near], made.side), words=f"{write.__name__}, {made.words}"
    )


# 4: a side's own noise


def own_noise(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    """Siblings that share their first tokens, with noise on one side's log-probs of these."""
    side = ("mu", "pi")[pick(random, range(2))]
    pool = pools[("demo", "smollm2")[pick(random, range(2))]]
    groups = [group for group in by_prompt(pool) if len(group) > 3]
    size = (0.1, 0.7, 3.0)[level] * rms(pool)
    made: Log = []
    differences: list[Floats] = []
    for group in [groups[i] for i in random.permutation(len(groups))[: int(random.integers(8, 20))]]:
        first, *others = some(random, group, 4)
        shared = min(*(len(response.ids) - 2 for response in (first, *others)), int(random.integers(12, 40)))
        mine, noisy = first.cut(shared), []
        for number, sibling in enumerate((first, *others)):
            parting = [20 + number, *sibling.ids[shared + 1 :]]
            values = {"mu": mine.mu, "pi": mine.pi}
            moved = size * random.standard_normal(shared) * (1 - np.exp(mine.mu))
            values[side] = np.minimum(values[side] + moved, -1e-7)
            noisy.append(values[side])
            made.append(
                Response(
                    first.prompt, [*mine.ids, *parting],
                    *(np.concatenate([values[name], getattr(sibling, name)[shared:]]) for name in ("mu", "pi")),
                )
            )  # fmt: skip
        differences += [first - second for index, first in enumerate(noisy) for second in noisy[:index]]
    planted = float(np.sqrt(np.mean(np.concatenate(differences) ** 2)))

    def judge(answer: Answer) -> Named:
        floors: dict[str, Any] = {}
        for pair in answer.document.get("pairs", []):
            floors |= (pair.get("blame") or {}).get("floors") or {}
        shown = {name: (floors.get(f"{name}_siblings") or {}).get("value") for name in ("mu", "pi")}
        mine, other = shown[side], shown["pi" if side == "mu" else "mu"]
        near = mine is not None and 0.6 < mine / planted < 1.2
        return Named(near, None, not other or other < 0.3 * planted, f"{shown}; planted {planted:.3g}")

    write = BOTH_SIDES[pick(random, range(3))]
    return Planted(
        write(folder, made), judge, words=f"{write.__name__}, {side}, {planted:.2g} nats, {len(made)} responses"
    )


# 8, of the log alone: the trainer has the newest weights, and d is larger before the change


def changing_weights(recorded: bool) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        count = int(random.integers(24, 60))
        family = ("demo", "smollm2")[pick(random, range(2))]
        log = some(random, [response for response in pools[family] if len(response.ids) > 30], count)
        times = (4.0, 12.0, 40.0)[level]
        share = (0.4, 0.7, 1.0)[level]
        size, seed, made = times * rms(log), int(random.integers(2**31)), []
        for response in log:
            length = len(response.ids)
            if random.random() > share:
                made.append(response.with_extra(weight_versions=["8"] * length) if recorded else response)
                continue
            at = int(random.integers(length // 5 + 1, 4 * length // 5))
            error = size * of_prompt(seed, response).standard_normal(LONGEST)[:length] * (1 - np.exp(response.mu))
            mu = np.minimum(np.where(np.arange(length) < at, response.mu + error, response.mu), -1e-7)
            versions = {"weight_versions": [["7", 0, at], ["8", at, length]]} if recorded else {}
            made.append(replace(response, mu=mu, extra={**response.extra, **versions}))
        versions_of = [response.extra.get("weight_versions") for response in made]
        mixed = sum(isinstance(parts, list) and len(parts) == 2 for parts in versions_of)

        def judge(answer: Answer) -> Named:
            versions = answer.log.get("versions") or {}
            if recorded:
                cause = "mixed_weights" in answer.findings and bool(versions.get("is_level_changed"))
                return Named(cause, versions.get("num_mixed") == mixed, None, str(versions))
            words = "\n".join(answer.verdict["evidence"])
            return Named(bool(re.search(r"at once|within .*responses|mixed_weights", words)), None, None, words[:400])

        words = f"plain, {family}, {times:.0f} rms in {share:.0%} of {count}"
        return Planted(plain(folder, made), judge, words=words)

    return planted
