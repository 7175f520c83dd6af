"""Logs with the faults of `computed`, and sound ones that look like them: places, own noise, weights in flight."""

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.planted_logs.base import Log, pick
from benchmarks.planted_logs.checkpoint import judged_parts
from benchmarks.planted_logs.computed import SOUND, Fault, in_flight, log_of, moved_to, updated
from benchmarks.planted_logs.judging import Answer, Named, Planted, accusations, ask
from benchmarks.planted_logs.logs import Plant, Pools, Random
from benchmarks.planted_logs.pools import DEMO, loaded, prompts_of_sums
from benchmarks.planted_logs.writing import BOTH_SIDES, plain

MIXED = (0.05, 0.2, 1.0)
"""How much of a state is its neighbour's, at each strength: about 0.09, 0.35 and 4 nats at unsure tokens."""
LESS = (0.1, 0.5, 30.0)
"""By how much less keys outside of a window count, in nats; the last is a window."""
AT_THE_END = (0.2, 0.5, 1.0)
NOISE = (0.01, 0.04, 0.2)
TIMES = (4.0, 12.0, 40.0)
"""How far the old weights are from the new ones, in rms of d."""
SIDES = ("mu", "pi")


_folder: list[Path] = []


def once(make: Callable[[], Any], *key: object) -> Any:
    """What `make` gives, kept in the scratch folder: a log is computed once, and judged whenever code changed."""
    path = _folder[0] / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.pickle"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(make()))
    return pickle.loads(path.read_bytes())


@cache
def model_of(folder: Path) -> Any:
    return loaded(folder)


@cache
def chats(folder: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = Path("examples/prompts/chats.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                json.loads(row).get("messages") or [{"role": "user", "content": json.loads(row)["prompt"]}],
                add_generation_prompt=True, tokenize=False,
            )
        )
        for row in rows
    ]  # fmt: skip


class Setting:
    """A model, prompts of few lengths, and how many tokens a response has."""

    def __init__(self, random: Random, smollm2: Path | None, *, siblings: int = 1, count: int | None = None) -> None:
        self.folder = DEMO if smollm2 is None else smollm2
        self.model = model_of(self.folder)
        self.end: int | None = None
        if smollm2 is not None:
            kind, self.tokens, number = "chats", 80, count or 16
            texts = chats(smollm2)
            chosen = [texts[i] for i in random.permutation(len(texts))[:number]]
            length = min(len(text) for text in chosen)
            self.prompts = [text[-length - (n % 2) * 4 :][: length + (n % 2) * 4] for n, text in enumerate(chosen)]
            self.prompts = [p if len(p) in (length, length + 4) else p[:length] for p in self.prompts]
        elif random.random() < 0.7:
            kind, self.tokens, number = "letters", 144, count or int(random.integers(20, 36))
            length, step = int(random.integers(24, 70)), int(random.integers(1, 12))
            self.prompts = [random.integers(15, 300, length + step * (n % 3)).tolist() for n in range(number)]
        else:
            kind, self.tokens, number = "sums", 120, count or int(random.integers(20, 36))
            self.prompts = prompts_of_sums(number, int(random.integers(5, 12)), int(random.integers(2**20)))
            self.end = self.model.config.eos_token_id
        self.prompts = [prompt for prompt in self.prompts for _ in range(siblings)]
        self.words = f"{kind}, {len(self.prompts)} responses"

    def log(self, mu: Fault, pi: Fault, seed: int) -> Log:
        key = (self.folder.name, self.prompts, self.tokens, mu, pi, seed, self.end)
        made: Log = once(lambda: log_of(self.model, self.prompts, self.tokens, mu, pi, seed, self.end), *key)
        return made


def sided(fault: Fault, side: str) -> tuple[Fault, Fault]:
    return (fault, SOUND) if side == "mu" else (SOUND, fault)


SIDE_WORDS = {"mu": ("engine", "(mu)"), "pi": ("training path", "trainer", "(pi)")}


def numbers_of(code: str, sentence: str) -> list[int]:
    """The block and the phase, or the place, that a sentence names."""
    pattern = {
        "period": r"every ([\d,]+) places of the context, at ([\d,]+)",
        "onset": r"place ([\d,]+) of the context",
    }
    match = re.search(pattern[code], sentence)
    return [int(number.replace(",", "")) for number in match.groups()] if match else []


def judge_places(code: str, numbers: Sequence[Sequence[int]], side: str) -> Callable[[Answer], Named]:
    """The cause, its numbers, each of which may be one of several, and the side; no side named is None."""

    def judge(answer: Answer) -> Named:
        verdict = answer.verdict
        named = verdict["code"] == code or any(code in str(cause) for cause in verdict["also"])
        shown = numbers_of(code, verdict["sentence"])
        words = verdict["sentence"].split(". ")[0]
        is_of = {name: any(word in words for word in SIDE_WORDS[name]) for name in SIDES}
        right = None if is_of["mu"] == is_of["pi"] or words.startswith("One side") else is_of[side]
        place = len(shown) == len(numbers) and all(n in values for n, values in zip(shown, numbers, strict=True))
        return Named(named, place, right, " / ".join([words, *verdict["evidence"]])[:500])

    return judge


def with_checkpoint(setting: Setting) -> list[str]:
    return ["--model", "demo" if setting.folder == DEMO else str(setting.folder)]


@dataclass(frozen=True)
class AtPlaces:
    """A log with a fault at places of the context, its side, and the numbers by which it is named."""

    log: Log
    side: str
    code: str
    numbers: list[list[int]]
    words: str
    fault: Fault

    @classmethod
    def drawn(
        cls, kind: str, random: Random, smollm2: Path | None, level: int, *, of_engine: bool = False
    ) -> "AtPlaces":
        """kind: period, onset, window or end; of_engine: the engine errs, else a side that is drawn too."""
        setting, side = Setting(random, smollm2), SIDES[pick(random, (0, 1))]
        side = "mu" if of_engine else side
        begins = sorted(len(prompt) for prompt in setting.prompts)
        longest = begins[-1] + setting.tokens
        if kind == "period":
            block = pick(random, [size for size in (16, 24, 32, 48, 64) if 4 * size <= longest])
            phase = int(random.integers(block))
            fault, code = Fault(block=block, phase=phase, mixed=MIXED[level]), "period"
            numbers, words = [[block], [(phase + 1) % block]], f"every {block} from {(phase + 1) % block}"
        else:
            first = int(
                random.integers(begins[len(begins) // 2] + 16, longest - 24 if setting.end is None else begins[0] + 60)
            )
            if kind == "end":
                first = longest - int(random.integers(4, 9)) - 1
                setting.prompts = [prompt for prompt in setting.prompts if len(prompt) == begins[-1]]
                setting.end = None
            fault = {
                "window": Fault(window=first, less=LESS[level]),
                "onset": Fault(first=first, mixed=MIXED[level]),
                "end": Fault(first=first, mixed=AT_THE_END[level]),
            }[kind]
            code, words, margin = "onset", f"from place {first + 1}", 1 if kind == "end" else 4
            numbers = [list(range(first + 1 - margin, first + 2 + margin))]
        log = setting.log(*sided(fault, side), int(random.integers(2**30)))
        return cls(log, side, code, numbers, f"{kind} of {side}, {words}, {setting.words}", fault)


def places(kind: str, smollm2: Path | None, *, explains: bool, of_engine: bool = False) -> Plant:
    """of_engine: the log holds the engine's side alone."""

    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        made = AtPlaces.drawn(kind, random, smollm2, level, of_engine=of_engine)
        write = plain if explains else BOTH_SIDES[pick(random, range(3))]
        arguments = ["--model", "demo" if smollm2 is None else str(smollm2)] if explains else []
        log = [replace(response, pi=np.full(len(response.ids), np.nan)) for response in made.log]
        return Planted(
            write(folder, log if of_engine else made.log), judge_places(made.code, made.numbers, made.side), arguments,
            f"{write.__name__}, {made.words}",
        )  # fmt: skip

    return planted


# 4: a side's own noise


def spread(log: Log, side: str) -> float:
    """Root mean square of the differences of one token's log-prob behind equal tokens, over pairs of siblings."""
    squares = []
    for number, mine in enumerate(log):
        for other in log[:number]:
            if mine.prompt != other.prompt or mine.ids == other.ids:
                continue
            shared = next(n for n, (a, b) in enumerate(zip([*mine.ids, -1], [*other.ids, -2], strict=False)) if a != b)
            squares += list((getattr(mine, side)[:shared] - getattr(other, side)[:shared]) ** 2)
    return float(np.sqrt(np.mean(squares))) if squares else 0.0


def own_noise(smollm2: Path | None, *, explains: bool) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        setting = Setting(random, smollm2, siblings=8 if smollm2 else 4, count=10)
        if smollm2:
            setting.tokens = 24  # most of its siblings part at once: 32 shared tokens take many of them
        side = SIDES[pick(random, (0, 1))]
        log = setting.log(*sided(Fault(noise=NOISE[level]), side), int(random.integers(2**30)))
        planted_size, other = spread(log, side), spread(log, SIDES[side == "mu"])

        def judge(answer: Answer) -> Named:
            floors: dict[str, Any] = {}
            for pair in answer.document.get("pairs", []) or [answer.document]:
                floors |= (pair.get("blame") or {}).get("floors") or {}
            shown = {name: (floors.get(f"{name}_siblings") or {}).get("value") for name in SIDES}
            mine = shown[side]
            near = mine is not None and 0.6 < mine / planted_size < 1.6
            accused = [cause for cause in answer.causes if answer.verdict["kind"] == "bug"]
            words = answer.verdict["sentence"].split(". ")[0]
            blames_other = bool(accused) and any(word in words for word in SIDE_WORDS[SIDES[side == "mu"]])
            words_of_answer = (
                f"{shown}; planted {planted_size:.3g}, other side {other:.3g}; {answer.verdict['kind']} {words}"
            )
            return Named(near, None, not blames_other, words_of_answer[:500])

        write = plain if explains else BOTH_SIDES[pick(random, range(3))]
        arguments = with_checkpoint(setting) if explains else []
        words = f"{write.__name__}, noise of {side}, rms {planted_size:.2g}, {setting.words}"
        return Planted(write(folder, log), judge, arguments, words)

    return planted


# 8: weights that change in flight


def flights(smollm2: Path | None, scratch: Path, *, explains: bool, keeps_cache: bool = False) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        setting = Setting(random, smollm2, count=16 if smollm2 else 24)
        seed = int(random.integers(2**30))
        tokens = min(setting.tokens, 96)
        groups = random.integers(tokens // 6, 5 * tokens // 6, 6)
        share = (0.5, 0.75, 1.0)[level]
        ats = [int(groups[n % 6]) if random.random() < share else 0 for n in range(len(setting.prompts))]

        def make() -> tuple[Log, float, float]:
            few = log_of(setting.model, setting.prompts[:6], 40, SOUND, SOUND, seed)
            rounding = float(np.sqrt(np.mean(np.concatenate([r.pi - r.mu for r in few]) ** 2)))
            new = loaded(setting.folder)
            size = moved_to(new, setting.model, few, TIMES[level] * rounding, seed)
            log = in_flight(setting.model, new, setting.prompts, ats, tokens, seed, keeps_cache=keeps_cache)
            return log, rounding, size

        log, rounding, size = once(make, setting.folder.name, setting.prompts, ats, tokens, seed, level, keeps_cache)
        ats = [at for _, at in sorted((len(prompt), at) for prompt, at in zip(setting.prompts, ats, strict=True))]
        words = (
            f"{setting.words}, {TIMES[level]:.0f} rms of {rounding:.2g} (rank 4, {size:.2g}), "
            f"{sum(map(bool, ats))} change{', old cache' if keeps_cache else ''}"
        )
        if not explains:
            source = plain(folder, log)

            def judge(answer: Answer) -> Named:
                words_of_answer = "\n".join([answer.verdict["sentence"], *answer.verdict["evidence"]])
                named = answer.verdict["code"] == "mixed_weights" or bool(
                    re.search(r"at once|within .*responses|mixed_weights", words_of_answer)
                )
                return Named(named, None, None, words_of_answer[:500])

            return Planted(source, judge, words=words)
        source = plain(folder, [response.with_extra(weight_version="8") for response in log])
        new, new_folder = loaded(setting.folder), folder / "new"
        updated(new, setting.model, size, seed)
        new.save_pretrained(new_folder)
        for path in setting.folder.glob("*token*"):
            (new_folder / path.name).write_bytes(path.read_bytes())

        def run() -> Named:
            ask(folder / "run", "import", source, "--out", folder / "run")
            answer = ask(
                folder / "run", "explain", folder / "run", "--model", new_folder,
                "--weights", f"7={setting.folder}", "--weights", f"8={new_folder}",
            )  # fmt: skip
            return judged_parts(answer, ats)

        return Planted(source, lambda _: Named(False), words=words, run=run)

    return planted


# Sound logs that look like these


def sure_then_unsure(log: Log, at: int) -> Log:
    """Texts whose tokens are sure before a place of the context and unsure behind it, as an answer behind a form."""
    tokens = [(t, m, p) for r in log for t, m, p in zip(r.ids, r.mu, r.pi, strict=True)]
    sure = [entry for entry in tokens if entry[1] > -0.01]
    unsure = [entry for entry in tokens if entry[1] < -0.3]
    random, made = np.random.default_rng(at), []
    for response in log:
        chosen = [
            (sure if place < at and sure else unsure)[
                int(random.integers(len(sure if place < at and sure else unsure)))
            ]
            for place in response.places
        ]
        ids, mu, pi = zip(*chosen, strict=True)
        made.append(type(response)(response.prompt, list(ids), np.array(mu), np.array(pi)))
    return made


def sound(kind: str, smollm2: Path | None, *, explains: bool, of_engine: bool = False) -> Plant:
    """kind: plain; siblings (some agree bit for bit); zeros (top-k of one at a third of the tokens); tools; steps.
    of_engine: the log holds the engine's side alone.
    """

    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        setting = Setting(
            random, smollm2, siblings=4 if kind == "siblings" else 1, count=8 if kind == "siblings" else None
        )
        log = setting.log(SOUND, SOUND, int(random.integers(2**30)))
        if kind == "steps":
            log = sure_then_unsure(log, len(setting.prompts[0]) + int(random.integers(24, 72)))
        elif kind == "zeros":
            made = []
            for response in log:
                alone = random.random(len(response.ids)) < 0.3
                mu, pi = (np.where(alone, 0.0, values) for values in (response.mu, response.pi))
                sets = [[token] if is_alone else [] for token, is_alone in zip(response.ids, alone, strict=True)]
                made.append(type(response)(response.prompt, response.ids, mu, pi, None, {"kept_token_ids": sets}))
            log = made
        elif kind == "tools":
            tool_ids, made = random.integers(5, 60, int(random.integers(6, 24))).tolist(), []
            for response in log:
                at = int(random.integers(4, max(5, len(response.ids) - 2)))
                mu, pi = (
                    np.insert(values, [at] * len(tool_ids), fill)
                    for values, fill in ((response.mu, np.nan), (response.pi, -1.5))
                )
                mask = [1] * at + [0] * len(tool_ids) + [1] * (len(response.ids) - at)
                ids = [*response.ids[:at], *tool_ids, *response.ids[at:]]
                made.append(type(response)(response.prompt, ids, mu, pi, mask))
            log = made
        if of_engine:
            log = [replace(response, pi=np.full(len(response.ids), np.nan)) for response in log]
        needs_plain = explains or kind in ("zeros", "tools")
        write = plain if needs_plain else BOTH_SIDES[pick(random, range(3))]

        def judge(answer: Answer) -> Named:
            accused = accusations(answer, has_sets=kind == "zeros")
            return Named(not accused and answer.verdict["kind"] != "bug", None, None, "; ".join(accused)[:500])

        explained = explains and kind not in ("steps", "tools", "zeros")
        words = f"{write.__name__}, {setting.words}"
        return Planted(write(folder, log), judge, with_checkpoint(setting) if explained else [], words)

    return planted


def faults(scratch: Path, smollm2: Path) -> dict[tuple[int, str], Plant]:
    _folder[:] = [scratch / "computed"]
    made: dict[tuple[int, str], Plant] = {}
    for model, folder in (("demo", None), ("SmolLM2", smollm2)):
        for explains in (False, True):
            where = f"{model}{', checkpoint' if explains else ''}"
            for kind in ("period", "onset", "window", "end"):
                made[3, f"computed {kind}, {where}"] = places(kind, folder, explains=explains)
                if explains:
                    engine_alone = places(kind, folder, explains=True, of_engine=True)
                    made[3, f"computed {kind}, {model}, engine alone, checkpoint"] = engine_alone
            made[4, f"computed noise, {where}"] = own_noise(folder, explains=explains)
            made[8, f"computed flight, {where}"] = flights(folder, scratch, explains=explains)
    made[8, "computed flight, demo, checkpoint, old cache"] = flights(None, scratch, explains=True, keeps_cache=True)
    return made


def clean_logs(smollm2: Path) -> dict[tuple[int, str], Plant]:
    made: dict[tuple[int, str], Plant] = {}
    for model, folder in (("demo", None), ("SmolLM2", smollm2)):
        for kind in ("plain", "siblings", "zeros", "tools", "steps"):
            made[0, f"computed {kind}, {model}"] = sound(kind, folder, explains=False)
        for kind in ("plain", "siblings"):
            made[0, f"computed {kind}, {model}, checkpoint"] = sound(kind, folder, explains=True)
        engine_alone = sound("plain", folder, explains=True, of_engine=True)
        made[0, f"computed plain, {model}, engine alone, checkpoint"] = engine_alone
    return made
