"""Conversations of several turns: sound ones, and ones whose history is written anew before a later turn."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.planted_logs.base import Log, Response, pick, some
from benchmarks.planted_logs.judging import Answer, Named, Planted
from benchmarks.planted_logs.writing import WITH_TURNS, Write

Random = np.random.Generator
NEW_LINE, START, END = 198, 1, 2
"""Of SmolLM2's vocabulary."""
THINK = ([48, 12, 9], [49, 12, 10])
ROLE, TOOL = [520, 9531], [520, 4690, 7]
SHARES = (0.0, 0.3, 1.0)
"""Of the trajectories that break, at each strength; at least one."""

Break = Callable[[Random, list[int], list[int], list[int]], list[list[int]]]
"""Header, completion and observation of a turn as a later prompt has them."""


def merged(random: Random, header: list[int], completion: list[int], seen: list[int]) -> list[list[int]]:
    """Two tokens became one, or one became two, somewhere in the answer."""
    place = int(random.integers(4, len(completion) - 6))
    few, many = sorted(random.integers(1, 4, 2).tolist())
    many += few == many
    taken, num_new = (many, few) if random.random() < 0.5 else (few, many)
    new = random.integers(40_000, 48_000, num_new).tolist()
    return [header, [*completion[:place], *new, *completion[place + taken :]], seen]


def dropped(random: Random, header: list[int], completion: list[int], seen: list[int]) -> list[list[int]]:
    """The thinking is left out."""
    end = completion.index(THINK[1][-1], len(THINK[0])) + 1
    return [header, completion[end:], seen]


def other_header(random: Random, header: list[int], completion: list[int], seen: list[int]) -> list[list[int]]:
    """The template puts tokens before the answer, or leaves some of its header out."""
    if random.random() < 0.5:
        return [[*header, *random.integers(30_000, 40_000, random.integers(1, 7)).tolist()], completion, seen]
    num_left = int(random.integers(1, len(header)))
    return [header[:num_left], completion, seen]


def shifted(random: Random, header: list[int], completion: list[int], seen: list[int]) -> list[list[int]]:
    """What the tool wrote lost its first tokens."""
    start = seen.index(TOOL[-1]) + 1
    lost = int(random.integers(1, 7))
    return [header, completion, [*seen[:start], *seen[start + lost :]]]


BREAKS: dict[str, tuple[Break | None, tuple[str, ...]]] = {
    "tokens merged or split": (merged, ("retokenized",)),
    "think block dropped": (dropped, ("dropped",)),
    "other header": (other_header, ("template",)),
    "observation shifted": (shifted, ("observation",)),
}


def first_difference(old: list[int], new: list[int]) -> int:
    return next(place for place in range(len(old)) if old[place : place + 1] != new[place : place + 1])


def conversation(random: Random, pool: Log, name: str, breaks: Break | None) -> tuple[Log, tuple[int, int] | None]:
    """A trajectory of 3 to 5 turns, and the turn (from 0) and the place in its prompt where it first breaks."""
    turns = int(random.integers(3, 6))
    answers = some(random, pool, 2 * turns)
    header = [START, *ROLE, NEW_LINE]
    history = [*answers[0].prompt[:20], END, NEW_LINE]
    at = int(random.integers(turns - 2)) if breaks else -1
    made: Log = []
    where = None
    late: tuple[int, list[int], list[int], list[int]] | None = None
    for turn in range(turns):
        thought, reply = answers[2 * turn].cut(int(random.integers(8, 40))), answers[2 * turn + 1]
        ids = [*THINK[0], *thought.ids, *THINK[1], *reply.ids[:60], END]
        size = len(ids)
        sides = [
            np.resize(np.concatenate([getattr(thought, side), getattr(reply, side)]), size) for side in ("mu", "pi")
        ]
        for values in sides:  # each answer begins so, which a sampler is sure of
            values[: len(THINK[0])] = -1e-3 * (0.5 + random.random())
        if late is not None and late[0] == turn:  # the history as the turn after the next one sees it
            before, *parts = late[1], late[2], late[3]
            history, late = [*before, *parts[0], *history[len(before) + len(parts[1]) :]], None
        made.append(Response([*history, *header], ids, sides[0], sides[1], extra={"trajectory": name}))
        seen = [NEW_LINE, START, *TOOL, *some(random, pool, 1)[0].ids[: int(random.integers(10, 40))], END, NEW_LINE]
        parts = [header, ids, seen]
        if turn == at and breaks is not None:
            new = breaks(random, header, ids, seen)
            place = len(history) + first_difference([*chain(*parts)], [*chain(*new)])
            if breaks is shifted:  # the next prompt is the first to hold it: it changes in the one after
                where, late = (turn + 2, place), (turn + 2, history, [*chain(*new)], [*chain(*parts)])
            else:
                where, parts = (turn + 1, place), new
        history = [*history, *chain(*parts)]
    return made, where


def plant(name: str) -> Callable[[Random, dict[str, Log], Path, int], Planted]:
    breaks, kinds = BREAKS[name]

    def planted(random: Random, pools: dict[str, Log], folder: Path, level: int) -> Planted:
        count = int(random.integers(12, 30))
        number = max(1, round(count * SHARES[level]))
        chosen = sorted(random.permutation(count)[:number].tolist())
        log: Log = []
        wheres = {}
        for index in range(count):
            turns, where = conversation(random, pools["smollm2"], f"t{index}", breaks if index in chosen else None)
            log += turns
            if where is not None:
                wheres[f"t{index}"] = where
        write: Write = WITH_TURNS[pick(random, range(len(WITH_TURNS)))]
        if write.__name__ != "plain":
            log = [replace(response, pi=np.full(len(response.ids), np.nan)) for response in log]

        def judge(answer: Answer) -> Named:
            return judged(answer, kinds, wheres, len(log) - count)

        words = f"{write.__name__}, {number} of {count} trajectories, {sorted(wheres.items())[:3]}"
        return Planted(write(folder, log), judge, words=words)

    return planted


def judged(answer: Answer, kinds: tuple[str, ...], wheres: dict[str, tuple[int, int]], later: int) -> Named:
    """Every broken trajectory is counted, of the kind that was planted, and the first places are those planted."""
    record = answer.log.get("turns") or {}
    counted = record.get("kinds") or {}
    cause = "turns_broken" in answer.findings and sum(counted.get(kind, 0) for kind in kinds) == len(wheres)
    shown = record.get("breaks") or []
    shown_places = [(entry["turn"], entry["position"]) for entry in shown]
    place = bool(shown) and set(shown_places) <= set(wheres.values())
    words = answer.findings.get("turns_broken", {"sentence": answer.words})["sentence"]
    return Named(cause, place, None, f"{counted}, {shown_places[:5]}, {words[:300]}")
