"""Faults of turns, heads and masks in conversations that a checkpoint samples itself, imported with that checkpoint.

Each turn is sampled behind what truly stands before it, decoded with a key-value cache in BF16; pi scores the whole
row in one pass. So the checkpoint agrees with each number of a sound log: a break, a head or an edge is all that is
wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.planted_logs.base import Log, Response, pick
from benchmarks.planted_logs.judging import Answer, Named, Planted, accusations
from benchmarks.planted_logs.logs import EDGES, Plant, Pools, Random, judge_edge, judge_head, moved_edges
from benchmarks.planted_logs.places import chats, model_of, once
from benchmarks.planted_logs.pools import DEMO, prompts_of_sums, scored
from benchmarks.planted_logs.turns import BREAKS, first_difference, judged
from benchmarks.planted_logs.writing import BOTH_SIDES, WITH_TURNS, plain

COUNTS = ((8, 10), (10, 13), (13, 17))
"""Of rows, or trajectories, at each strength."""
HEADS = ("Sure", "Sure, here", "Answer: let me think step by step")


@dataclass(frozen=True)
class Speaker:
    """A checkpoint that samples turns, and what its template writes around them."""

    folder: Path
    model: Any
    tokenizer: Any

    @classmethod
    def of(cls, smollm2: Path | None) -> "Speaker":
        folder = smollm2 or DEMO
        return cls(folder, model_of(folder), AutoTokenizer.from_pretrained(folder))

    @property
    def end(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def arguments(self) -> list[str]:
        """Of `import`. All responses are read and looked at; statistics and `explain` take some of them."""
        if self.folder == DEMO:
            return ["--model", "demo", "--max-tokens", "600"]
        return ["--model", str(self.folder), "--max-tokens", "128"]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def header(self) -> list[int]:
        return self.ids("<|im_start|>assistant\n")

    def questions(self, random: Random, count: int) -> list[list[int]]:
        """Prompts without the header of the answer."""
        if self.folder == DEMO:
            prompts = prompts_of_sums(count, int(random.integers(2, 5)), int(random.integers(2**20)))
        else:
            texts = chats(self.folder)
            prompts = [texts[i] for i in random.integers(0, len(texts), count)]
            prompts = [prompt if len(prompt) <= 80 else [*prompt[:60], *prompt[-20:]] for prompt in prompts]
        return [prompt[: -len(self.header)] for prompt in prompts]

    def seen(self, random: Random, ids: list[int]) -> list[int]:
        """What stands between an answer and the next header: its end, if it was cut, and what a tool or user says."""
        if self.folder == DEMO:
            text = self.ids("<|im_start|>user\nsum " + " ".join(f"{n}:{random.integers(10, 99)}" for n in range(1, 4)))
        else:
            words = ["result", "error", "file", "42", "Paris", "the", "of", "ok", "value", "1.5", "is", "\n", "line"]
            text = self.ids("<|im_start|>tool\n" + " ".join(random.choice(words, int(random.integers(8, 24)))))
        return [*([] if ids[-1] == self.end else [self.end]), *self.ids("\n"), *text, self.end, *self.ids("\n")]

    @torch.inference_mode()
    def answers(self, contexts: list[list[int]], tokens: list[int], seed: int) -> list[tuple[list[int], list[float]]]:
        """Ids and log-probs behind each context, at most so many, one batch that is padded on the left."""
        generator = torch.Generator().manual_seed(seed)
        longest = max(map(len, contexts))
        ids = torch.tensor([[self.end] * (longest - len(context)) + context for context in contexts])
        mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
        made: list[tuple[list[int], list[float]]] = [([], []) for _ in contexts]
        cache, places = None, (mask.cumsum(1) - 1).clamp(min=0)
        for _ in range(max(tokens)):
            answer = self.model(ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            log_probs = torch.log_softmax(answer.logits[:, -1].float(), -1)
            ids = torch.multinomial(log_probs.exp(), 1, generator=generator)
            for (row, values), token, log_prob, most in zip(
                made, ids[:, 0].tolist(), log_probs.gather(1, ids)[:, 0].tolist(), tokens, strict=True
            ):
                if len(row) < most and row[-1:] != [self.end]:
                    row.append(token)
                    values.append(log_prob)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            places = places[:, -1:] + 1
        return made


def with_pi(speaker: Speaker, log: Log) -> Log:
    return [replace(response, pi=scored(speaker.model, response.prompt, response.ids)) for response in log]


def without_pi(log: Log) -> Log:
    return [replace(response, pi=np.full(len(response.ids), np.nan)) for response in log]


# 1: turns

Turn = tuple[list[int], list[int], list[float]]
"""Prompt, ids, mu."""


def split_token(speaker: Speaker) -> Callable[..., list[list[int]]]:
    """A token that was sampled becomes several of the same text, as where text is tokenized again by other merges."""

    def breaks(random: Random, header: list[int], completion: list[int], seen: list[int]) -> list[list[int]]:
        for place in (4 + random.permutation(len(completion) - 8)).tolist():
            text = speaker.tokenizer.decode([completion[place]])
            for cut in range(1, len(text)):
                parts = [*speaker.ids(text[:cut]), *speaker.ids(text[cut:])]
                if speaker.tokenizer.decode(parts) == text and text.isascii() and parts[0] != completion[place]:
                    return [header, [*completion[:place], *parts, *completion[place + 1 :]], seen]
        raise ValueError("no token of this answer can be split")

    return breaks


def dropped(random: Random, header: list[int], completion: list[int], seen: list[int]) -> list[list[int]]:
    """The first half of the answer is left out, as a template leaves out thinking."""
    return [header, completion[int(random.integers(9, len(completion) - 6)) :], seen]


def other_header(speaker: Speaker) -> Callable[..., list[list[int]]]:
    def breaks(random: Random, header: list[int], completion: list[int], seen: list[int]) -> list[list[int]]:
        if random.random() < 0.5:
            return [[*header, *speaker.ids((" ", "\n\n", "ok\n")[pick(random, range(3))])], completion, seen]
        return [header[: int(random.integers(1, len(header)))], completion, seen]

    return breaks


def shifted(random: Random, header: list[int], completion: list[int], seen: list[int]) -> list[list[int]]:
    """What the tool or user wrote lost some tokens behind its header."""
    start = len(seen) - int(random.integers(7, 9))
    return [header, completion, [*seen[:start], *seen[start + int(random.integers(1, 5)) :]]]


def breaks_of(speaker: Speaker) -> dict[str, Callable[..., list[list[int]]]]:
    return {
        "tokens merged or split": split_token(speaker), "think block dropped": dropped,
        "other header": other_header(speaker), "observation shifted": shifted,
    }  # fmt: skip


def conversations(
    speaker: Speaker, random: Random, count: int, name: str | None, chosen: list[int]
) -> tuple[Log, dict[str, tuple[int, int]]]:
    """Trajectories of three turns, each sampled behind its own prompt; where the chosen ones break."""
    turns = 3
    histories = speaker.questions(random, count)
    header = speaker.header
    ats = dict.fromkeys(chosen, 0)
    wheres: dict[str, tuple[int, int]] = {}
    rows: list[list[Response]] = [[] for _ in range(count)]
    late: dict[int, tuple[int, list[int], int]] = {}
    for turn in range(turns):
        for index, (due, new, size) in list(late.items()):
            if due == turn:
                histories[index] = [*new, *histories[index][size:]]
                del late[index]
        prompts = [[*history, *header] for history in histories]
        tokens = random.integers(24, 40, count).tolist()
        answers = speaker.answers(prompts, tokens, int(random.integers(2**30)))
        for index, (prompt, (ids, mu)) in enumerate(zip(prompts, answers, strict=True)):
            rows[index].append(Response(prompt, ids, np.array(mu), np.array([]), extra={"trajectory": f"t{index}"}))
            parts = [header, ids, speaker.seen(random, ids)]
            full = [*histories[index], *chain(*parts)]
            if name is not None and ats.get(index, -1) == turn:
                try:
                    new = [*histories[index], *chain(*breaks_of(speaker)[name](random, *parts))]
                except ValueError:  # too short an answer, or no token of it can be split: a turn later, or never
                    if turn < turns - 2:
                        ats[index] = turn + 1
                    histories[index] = full
                    continue
                is_late = name == "observation shifted"  # the next prompt is the first to hold it
                wheres[f"t{index}"] = (turn + 1 + is_late, first_difference(full, new))
                if is_late:
                    late[index] = (turn + 2, new, len(full))
                else:
                    full = new
            histories[index] = full
    done = {index for index in range(count) if late.get(index) is None}
    wheres = {key: where for key, where in wheres.items() if int(key[1:]) in done and where[0] < turns}
    return with_pi(speaker, [*chain(*rows)]), wheres


def turns_plant(name: str | None, smollm2: Path | None) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        speaker = Speaker.of(smollm2)
        count = int(random.integers(*COUNTS[level]))
        chosen = sorted(random.permutation(count)[: max(1, round(count * (0.0, 0.3, 1.0)[level]))].tolist())
        seed = int(random.integers(2**30))
        log, wheres = once(
            lambda: conversations(speaker, np.random.default_rng(seed), count, name, chosen if name else []),
            "turns", name, speaker.folder.name, count, chosen, seed,
        )  # fmt: skip
        write = WITH_TURNS[pick(random, range(len(WITH_TURNS)))]
        if write is not plain or random.random() < 0.5:
            log = without_pi(log)
        words = f"{write.__name__}, {len(wheres)} of {count} trajectories, {sorted(wheres.items())[:3]}"

        def judge(answer: Answer) -> Named:
            if name is None:
                return judge_sound(answer)
            named = judged(answer, BREAKS[name][1], wheres, len(log) - count)
            return replace(named, words=f"{answer.verdict['kind']} {answer.verdict['code']}: {named.words}")

        return Planted(write(folder, log), judge, speaker.arguments, words)

    return planted


def judge_sound(answer: Answer) -> Named:
    accused = accusations(answer)
    kind = answer.verdict["kind"]
    words = "; ".join(accused)[:400] or f"{kind} {'' if kind in ('precision', 'clean') else answer.words[:300]}"
    return Named(not accused and kind != "bug", None, None, words)


# 2: heads and masks


Row = tuple[list[int], list[int], list[float], list[int]]
"""Prompt, ids, mu, mask; what is not sampled has no number yet."""


def sampled_on(speaker: Speaker, random: Random, rows: list[Row], *, is_last: bool, closes: bool) -> list[Row]:
    """Rows with another sampled stretch, and with what stands behind it; but for the last stretch only rows whose
    stretch ends a turn: one that is cut off is no conversation.
    """
    tokens = [int(random.integers(80, 110)) if speaker.folder == DEMO else int(random.integers(48, 72))] * len(rows)
    answers = speaker.answers([[*row[0], *row[1]] for row in rows], tokens, int(random.integers(2**30)))
    longer = []
    for (prompt, ids, mu, mask), (new, values) in zip(rows, answers, strict=True):
        if not is_last and new[-1] != speaker.end:
            continue
        others = [*speaker.seen(random, new), *speaker.header]
        outside = others if not is_last else speaker.ids("\n") if closes and new[-1] == speaker.end else []
        longer.append((
            prompt, [*ids, *new, *outside], [*mu, *values, *[np.nan] * len(outside)],
            [*mask, *[1] * len(new), *[0] * len(outside)],
        ))  # fmt: skip
    return longer


def rows_with_tools(speaker: Speaker, random: Random, count: int, *, closes: bool) -> Log:
    """So many rows of two sampled stretches, with what a tool or user says between them, outside the mask; closes: the
    template's last new line stands at the end.
    """
    rows: list[Row] = []
    while len(rows) < count:  # few answers of SmolLM2 end in time
        questions = speaker.questions(random, (2 if speaker.folder == DEMO else 4) * count)
        openings: list[Row] = [([*question, *speaker.header], [], [], []) for question in questions]
        rows += sampled_on(speaker, random, openings, is_last=False, closes=closes)
    rows = sampled_on(speaker, random, rows[:count], is_last=True, closes=closes)
    log = [Response(prompt, ids, np.array(mu), np.array([]), mask) for prompt, ids, mu, mask in rows]
    return with_pi(speaker, log)


def masks_plant(edge: str | None, smollm2: Path | None) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        speaker = Speaker.of(smollm2)
        count, closes, seed = int(random.integers(*COUNTS[level])), random.random() < 0.5, int(random.integers(2**30))
        if smollm2 is not None:  # its rows take minutes: of each strength there is one log, whose masks are moved
            seed = level % 2
            count, closes = COUNTS[level][0] + seed, bool(seed)
        log: Log = once(
            lambda: rows_with_tools(speaker, np.random.default_rng(seed), count, closes=closes),
            "masks", speaker.folder.name, count, closes, seed,
        )  # fmt: skip
        write = BOTH_SIDES[pick(random, range(3))]
        has_pi = write is not plain or random.random() < 0.5
        if edge is not None:
            log = [replace(response, mask=moved_edges(response.mask or [], edge)) for response in log]
        log = log if has_pi else without_pi(log)

        def judge(answer: Answer) -> Named:
            if edge is None:
                return judge_sound(answer)
            named = judge_edge(edge)(answer)
            head = answer.findings.get("constant_head")
            if edge == "begins early" and head is not None and "later stretches" in head["sentence"]:
                named = Named(True, words=head["sentence"])  # the same token of a header each time: named by it
            return replace(named, words=f"{answer.verdict['kind']} {answer.verdict['code']}: {named.words}")

        words = f"{write.__name__}, {edge}, {len(log)} rows, pi {has_pi}, closes {closes}"
        return Planted(write(folder, log), judge, speaker.arguments, words)

    return planted


def rows_with_head(speaker: Speaker, random: Random, count: int, head: list[int], tokens: int) -> Log:
    """Responses behind a prefix that the engine read as its prompt; mu of the prefix is that of a prompt."""
    prompts = [[*question, *speaker.header] for question in speaker.questions(random, count)]
    answers = speaker.answers([[*p, *head] for p in prompts], [tokens] * count, int(random.integers(2**30)))
    log = [
        Response(p, [*head, *ids], np.concatenate([scored(speaker.model, p, head), mu]), np.array([]))
        for p, (ids, mu) in zip(prompts, answers, strict=True)
    ]
    return with_pi(speaker, log)


def heads_plant(smollm2: Path | None) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        speaker = Speaker.of(smollm2)
        count, seed = int(random.integers(*COUNTS[level])), int(random.integers(2**30))
        size = (1, 3, 8)[level]
        head = random.integers(15, 270, size).tolist() if smollm2 is None else speaker.ids(HEADS[level])
        log: Log = once(
            lambda: rows_with_head(speaker, np.random.default_rng(seed), count, head, 48),
            "heads", speaker.folder.name, count, head, seed,
        )  # fmt: skip
        is_scored = level > 0 and random.random() < 0.4
        if not is_scored:
            log = [replace(r, mu=np.where(np.arange(len(r.ids)) < len(head), np.nan, r.mu)) for r in log]
        write = BOTH_SIDES[pick(random, range(3))]
        has_pi = write is not plain or random.random() < 0.5
        log = log if has_pi else without_pi(log)

        def judge(answer: Answer) -> Named:
            named = judge_head(len(head))(answer)
            return replace(named, words=f"{answer.verdict['kind']} {answer.verdict['code']}: {named.words}")

        words = f"{write.__name__}, {len(head)} tokens, {count} responses, scored {is_scored}, pi {has_pi}"
        return Planted(write(folder, log), judge, speaker.arguments, words)

    return planted


def faults(smollm2: Path) -> dict[tuple[int, str], Plant]:
    made: dict[tuple[int, str], Plant] = {}
    for model, folder in (("demo", None), ("SmolLM2", smollm2)):
        where = f"{model}, checkpoint"
        for name in BREAKS:
            if folder or name != "tokens merged or split":  # the demo checkpoint's tokens are letters
                made[1, f"sampled: {name}, {where}"] = turns_plant(name, folder)
        made[2, f"sampled: constant head, {where}"] = heads_plant(folder)
        for edge in EDGES:
            made[2, f"sampled: mask {edge}, {where}"] = masks_plant(edge, folder)
    return made


def clean_logs(smollm2: Path) -> dict[tuple[int, str], Plant]:
    made: dict[tuple[int, str], Plant] = {}
    for model, folder in (("demo", None), ("SmolLM2", smollm2)):
        made[0, f"sampled: turns, {model}, checkpoint"] = turns_plant(None, folder)
        made[0, f"sampled: masks, {model}, checkpoint"] = masks_plant(None, folder)
    return made
