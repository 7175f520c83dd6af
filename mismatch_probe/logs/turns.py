"""The turns of a trajectory: whether each prompt begins with the prompt and the completion of the turn before it.

Where it does not, a trainer that joins the turns to one row scores a context from which nothing was sampled.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.notation import write_count, write_many, write_share
from mismatch_probe.records.log_readings import TurnBreak, TurnReading
from mismatch_probe.records.sequences import IntArray, LoggedResponse
from mismatch_probe.stats.sequences import common_length

TextOf = Callable[[Sequence[int]], list[str]]
"""The text of each token of a sequence."""
_SHORT: Final = 8
"""Tokens: a longer stretch is not cut otherwise, but left out, inserted or written anew."""
_ANCHOR: Final = 8
"""So many equal tokens show that two sequences go on alike; fewer do where the older one ends."""
_ALIKE: Final = 16
_ALIKE_TO_END: Final = 4
"""Equal tokens behind an edit by which a history is recognised, in the middle of it and up to its end."""
_MOST_OPEN_TOKENS: Final = 8_000_000
"""The tokens of trajectories that may go on; beyond, the one that was added to longest ago counts as ended."""
_MOST_EDITS: Final = 64
_LONGEST_END: Final = 2
"""Tokens with which a turn may end otherwise than it was sampled."""
_MOST_BREAKS: Final = 12
_IDS_OF_A_BREAK: Final = 8
_MOST_MARKS: Final = 256


class BreakKind(StrEnum):
    """What happened to the first tokens that differ."""

    RETOKENIZED = "retokenized"
    DROPPED = "dropped"
    TEMPLATE = "template"
    OBSERVATION = "observation"
    REWRITTEN = "rewritten"
    PLACEHOLDERS = "placeholders"


_WORDS: Final = {
    BreakKind.RETOKENIZED: "by tokens merged or split",
    BreakKind.DROPPED: "by a block left out of what was sampled",
    BreakKind.TEMPLATE: "by what the template writes",
    BreakKind.OBSERVATION: "by a shifted or changed observation",
    BreakKind.REWRITTEN: "by a history written anew",
    BreakKind.PLACEHOLDERS: "by another number of an image's placeholders",
}


@dataclass(frozen=True)
class _Turn:
    """A prompt and what followed it: the ids [T] of both, and the stretches [start, end) that were sampled, those of
    the turns before too where it continues them.
    """

    ids: IntArray
    prompt_length: int
    sampled_stretches: tuple[tuple[int, int], ...]


@dataclass
class _Trajectory:
    turns: list[_Turn] = field(default_factory=list)
    joined_ids: IntArray | None = None
    """What a trainer has that joins the turns, once a turn has broken the prefix: up to the end of the last turn."""
    num_tokens: int = 0
    has_several: bool = False
    is_broken: bool = False


class TurnChecks:
    """Add every response, then ask. Memory is bounded, whatever the order of the log."""

    def __init__(self, text_of: TextOf | None = None) -> None:
        self._text_of = text_of
        self._open: OrderedDict[tuple[int | None, str], _Trajectory] = OrderedDict()
        self._open_tokens = 0
        self._reading = TurnReading()
        self._marks: Counter[tuple[int, int]] = Counter()

    def add(self, response: LoggedResponse) -> LoggedResponse | None:
        """Compare a turn with those before it; the turns of a trajectory come in their order.

        What a response has before its first sampled token belongs to the prompt, and turns that it joins are joined.
        Returns a turn behind a break as a trainer has it that joins the turns, with the engine's log-probs: its prompt
        is all that was sampled and observed before; None where the prompt is that anyway, or nothing tells it.
        """
        if response.trajectory is None or not response.prompt_token_ids.size or not response.sampled.any():
            return None
        key = (response.step, response.trajectory)
        trajectory = self._open.setdefault(key, _Trajectory())
        self._open.move_to_end(key)
        turn = _turn_of(response)
        num_joined = len(turn.sampled_stretches) - 1
        is_first = not trajectory.turns
        if not is_first:
            stretches = self._compare(trajectory, turn, response.where)
            turn = replace(turn, sampled_stretches=(*stretches, *turn.sampled_stretches))
        self._reading.num_turns += num_joined
        if not trajectory.has_several and (num_joined or not is_first):
            trajectory.has_several = True
            self._reading.num_trajectories += 1
        joined_prompt = None if is_first else _joined_prompt(trajectory, turn)
        completion = turn.ids[turn.prompt_length :]
        trajectory.joined_ids = None if joined_prompt is None else np.concatenate([joined_prompt, completion])
        trajectory.turns.append(turn)
        trajectory.num_tokens += turn.ids.size
        self._open_tokens += turn.ids.size
        while self._open_tokens > _MOST_OPEN_TOKENS and len(self._open) > 1:
            _, oldest = self._open.popitem(last=False)
            self._open_tokens -= oldest.num_tokens
        if joined_prompt is None:
            return None
        self._reading.num_joined += 1
        return _with_prompt(response, joined_prompt, completion.size)

    def _compare(self, trajectory: _Trajectory, new: _Turn, where: str) -> tuple[tuple[int, int], ...]:
        """Count a turn after the first; returns the stretches of its prompt that were sampled before."""
        reading, prompt = self._reading, new.ids[: new.prompt_length]
        last = trajectory.turns[-1]
        position = common_length(last.ids, prompt)
        if position == last.ids.size:
            reading.num_turns += 1
            return last.sampled_stretches
        edit = _first_edit(last.ids[position:], prompt[position:])
        goes_on_alike = edit is not None and _go_on_alike(last.ids[position:], prompt[position:], edit)
        has_completion = position - last.prompt_length >= max(1, 2 * (last.ids.size - position))  # but for its end
        if not goes_on_alike and not has_completion:
            for turn in reversed(trajectory.turns):
                if np.array_equal(prompt, turn.ids[: turn.prompt_length]):
                    return tuple(stretch for stretch in turn.sampled_stretches if stretch[0] < turn.prompt_length)
                if _begins_with(prompt, turn.ids):
                    reading.num_turns += 1
                    return turn.sampled_stretches
            if position <= trajectory.turns[0].prompt_length:
                reading.num_restarts += 1
                return ()
        reading.num_turns += 1
        reading.num_broken += 1
        if not trajectory.is_broken:
            trajectory.is_broken = True
            self._add_first_break(trajectory, prompt, where, position, edit)
        return ()

    def _add_first_break(
        self, trajectory: _Trajectory, prompt: IntArray, where: str, position: int, edit: tuple[int, int] | None
    ) -> None:
        last = trajectory.turns[-1]
        num_old, num_new = edit or (last.ids.size - position, prompt.size - position)
        placeholders = None if edit is None else _placeholders(last.ids, prompt, position)
        if placeholders is not None:
            position, num_old, num_new = placeholders
        old, new = last.ids[position:][:num_old].tolist(), prompt[position:][:num_new].tolist()
        texts = None if self._text_of is None else ("".join(self._text_of(old)), "".join(self._text_of(new)))
        is_same_text = None if texts is None else _is_same_text(*texts, is_end=edit is None)
        kind = BreakKind.PLACEHOLDERS
        if placeholders is None:
            kind = _break_kind(trajectory, position, edit, is_same_text)
        if kind == BreakKind.DROPPED and len(self._marks) < _MOST_MARKS:
            self._marks[old[0], old[-1]] += 1
        reading = self._reading
        reading.num_broken_trajectories += 1
        reading.kinds[kind] = reading.kinds.get(kind, 0) + 1
        if len(reading.breaks) < _MOST_BREAKS:
            reading.breaks.append(
                TurnBreak(
                    where=where,
                    turn=len(trajectory.turns),
                    kind=kind,
                    position=position,
                    num_old=num_old,
                    num_new=num_new,
                    old_ids=old[:_IDS_OF_A_BREAK],
                    new_ids=new[:_IDS_OF_A_BREAK],
                    old_text="" if texts is None else texts[0][:200],
                    new_text="" if texts is None else texts[1][:200],
                )
            )

    def reading(self) -> TurnReading | None:
        """What the turns show; None where no trajectory has several."""
        return self._reading if self._reading.num_trajectories else None

    def findings(self) -> list[LogFinding]:
        """One finding where trajectories have several turns, else none."""
        reading = self.reading()
        if reading is None:
            return []
        begin = f"begin{'s' if reading.num_restarts == 1 else ''} anew"
        restarts = f"; {write_many(reading.num_restarts, 'turn')} {begin}" if reading.num_restarts else ""
        counts = reading.num_trajectories, reading.num_turns, reading.num_restarts
        of_all = dict(zip(("trajectories", "turns", "restarts"), counts, strict=True))
        total = write_count(reading.num_turns)
        if not reading.num_broken:
            variant, number = "" if reading.num_turns else "none", write_count(reading.num_trajectories)
            words = LogCode.TURNS.sentence(variant, total=total, trajectories=number, anew=restarts)
            return [LogFinding(code=LogCode.TURNS, sentence=words, level=LogCode.TURNS.level, evidence=of_all)]
        kinds = sorted(reading.kinds.items(), key=lambda item: -item[1])
        return [
            LogFinding.of(
                LogCode.TURNS_BROKEN,
                evidence=of_all | {"broken": reading.num_broken, "kinds": dict(kinds)},
                broken=write_count(reading.num_broken),
                total=total,
                share=write_share(reading.num_broken, reading.num_turns),
                trajectories=write_count(reading.num_broken_trajectories),
                all_trajectories=write_count(reading.num_trajectories),
                kinds=", ".join(f"{write_count(count)} {_WORDS[BreakKind(kind)]}" for kind, count in kinds),
                marks=self._marks_words(reading.kinds.get(BreakKind.DROPPED, 0)),
                first=reading.breaks[0].words,
                anew=restarts,
            )
        ]

    def _marks_words(self, num_dropped: int) -> str:
        """Which ids begin and end the blocks that are left out, where nearly all have the same."""
        if num_dropped < 2:
            return ""
        (first, last), count = self._marks.most_common(1)[0]
        if count < 0.8 * num_dropped:
            return ""
        start, end = (str(first), str(last)) if self._text_of is None else map(repr, self._text_of([first, last]))
        return f", which begins with {start} and ends with {end}"


def _turn_of(response: LoggedResponse) -> _Turn:
    start = response.prompt_token_ids.size
    edges = np.flatnonzero(np.diff(np.concatenate([[0], response.sampled, [0]]).astype(np.int8))) + start
    own = tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    return _Turn(np.concatenate([response.prompt_token_ids, response.token_ids]), own[0][0], own)


def _joined_prompt(trajectory: _Trajectory, new: _Turn) -> IntArray | None:
    """What was sampled and observed before a turn, where its prompt is something else and says what was added."""
    last, prompt = trajectory.turns[-1], new.ids[: new.prompt_length]
    history = last.ids if trajectory.joined_ids is None else trajectory.joined_ids
    if trajectory.joined_ids is None and _begins_with(prompt, last.ids):
        return None
    addition = _addition(last.ids, prompt)
    return None if addition is None else np.concatenate([history, addition])


def _addition(old: IntArray, new: IntArray) -> IntArray | None:
    """What stands in `new` behind all of `old`, which may differ in places; None where nothing tells where `old` ends,
    or it is another conversation.
    """
    for number in range(_MOST_EDITS):
        length = common_length(old, new)
        old, new = old[length:], new[length:]
        if not old.size:
            return new
        edit = _first_edit(old, new)
        if edit is None:
            return new[old.size :] if old.size <= _LONGEST_END and length else None
        if number == 0 and not _go_on_alike(old, new, edit):
            return None
        old, new = old[edit[0] :], new[edit[1] :]
    return None


def _with_prompt(response: LoggedResponse, prompt: IntArray, num_tokens: int) -> LoggedResponse:
    """The last tokens of a response behind another prompt, without what the trainer computed behind its own."""
    return replace(
        response,
        prompt_token_ids=prompt,
        token_ids=response.token_ids[-num_tokens:],
        sampled=response.sampled[-num_tokens:],
        log_mu=None if response.log_mu is None else response.log_mu[-num_tokens:],
        log_pi=None,
        log_ref=None,
        entropy_nats=None,
    )


def _begins_with(ids: IntArray, start: IntArray) -> bool:
    return ids.size >= start.size and bool(np.array_equal(ids[: start.size], start))


def _first_edit(old: IntArray, new: IntArray) -> tuple[int, int] | None:
    """How many tokens of `old` stand for how many of `new` before both go on alike, the fewest; None where they never
    do. Both start where they differ.
    """
    candidates = [*_inner_anchors(old, new), *_anchors_at_end(old, new)]
    return min(candidates, key=sum, default=None)


def _inner_anchors(old: IntArray, new: IntArray) -> list[tuple[int, int]]:
    if min(old.size, new.size) < _ANCHOR:
        return []
    hashes, starts = np.unique(_hashes(old), return_index=True)
    of_new = _hashes(new)
    places = np.minimum(np.searchsorted(hashes, of_new), hashes.size - 1)
    hits = np.flatnonzero(hashes[places] == of_new)
    if not hits.size:
        return []
    first = hits[(starts[places[hits]] + hits).argmin()]
    return [(int(starts[places[first]]), int(first))]


def _go_on_alike(old: IntArray, new: IntArray, edit: tuple[int, int]) -> bool:
    """Whether so much is alike behind an edit that the new sequence is the old one, and no other conversation under
    the same template.
    """
    rest = old[edit[0] :]
    length = common_length(rest, new[edit[1] :])
    return length >= _ALIKE or (length == rest.size and length >= _ALIKE_TO_END)


def _hashes(ids: IntArray) -> npt.NDArray[np.uint64]:
    """A hash of each `_ANCHOR` tokens in a row."""
    factors = np.random.default_rng(1).integers(1, 2**63, _ANCHOR).astype(np.uint64) | np.uint64(1)
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), _ANCHOR)
    hashes: npt.NDArray[np.uint64] = (windows * factors).sum(axis=1, dtype=np.uint64)
    return hashes


def _anchors_at_end(old: IntArray, new: IntArray) -> list[tuple[int, int]]:
    """The last tokens of `old`, fewer than `_ANCHOR`, where they stand in `new` first, and not far behind its start:
    the token that ends a turn comes again.
    """
    anchors = []
    for length in range(1, min(_ANCHOR, old.size + 1, new.size + 1)):
        windows = np.lib.stride_tricks.sliding_window_view(new, length)
        hits = np.flatnonzero((windows == old[-length:]).all(axis=1))
        if not hits.size:
            break
        if hits[0] > 4 * length:
            continue
        anchors.append((old.size - length, int(hits[0])))
    return anchors


def _is_same_text(old: str, new: str, *, is_end: bool) -> bool:
    """Whether two stretches are one text; where the older one ends without an anchor, the newer goes on."""
    return new.startswith(old) if is_end else new == old


def _break_kind(
    trajectory: _Trajectory, position: int, edit: tuple[int, int] | None, is_same_text: bool | None
) -> BreakKind:
    last = trajectory.turns[-1]
    if is_same_text:
        return BreakKind.RETOKENIZED
    if edit is None:
        is_end_of_turn = last.ids.size - position <= _LONGEST_END and position > trajectory.turns[0].prompt_length
        return BreakKind.TEMPLATE if is_end_of_turn else BreakKind.REWRITTEN
    num_old, num_new = edit
    if position + num_old <= trajectory.turns[0].prompt_length:
        return BreakKind.TEMPLATE
    if not _touches(last.sampled_stretches, position, position + num_old):
        starts = {start for start, _ in last.sampled_stretches}
        is_header = position + num_old in starts and max(edit) <= _SHORT
        return BreakKind.TEMPLATE if is_header else BreakKind.OBSERVATION
    if num_old and num_new and max(edit) <= _SHORT:
        return BreakKind.RETOKENIZED if is_same_text is None else BreakKind.TEMPLATE
    if num_old and num_new <= _SHORT:
        return BreakKind.DROPPED
    return BreakKind.TEMPLATE if num_old <= _SHORT else BreakKind.REWRITTEN


_LEAST_PLACEHOLDERS: Final = 16
"""Equal tokens in a row that stand for the patches of an image, in both prompts."""


def _placeholders(old: IntArray, new: IntArray, position: int) -> tuple[int, int, int] | None:
    """Where a row of one token begins that is longer in one of both, and how long it is in each; None where the
    sequences first differ elsewhere. They are equal up to `position`.
    """
    if position < _LEAST_PLACEHOLDERS:
        return None
    token = old[position - 1]
    start = position - 1
    while start > 0 and old[start - 1] == token:
        start -= 1
    num_old, num_new = (_length_of_run(ids[start:], token) for ids in (old, new))
    is_run = min(num_old, num_new) >= _LEAST_PLACEHOLDERS and num_old != num_new
    return (start, num_old, num_new) if is_run else None


def _length_of_run(ids: IntArray, token: int) -> int:
    others = np.flatnonzero(ids != token)
    return int(others[0]) if others.size else ids.size


def _touches(stretches: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether tokens of [start, end) are in a stretch, or the place `start` of an insertion is inside one."""
    return any(start < last and max(end, start + 1) > first + (start == end) for first, last in stretches)
