"""Windows whose keys outside count a little less, periods, steps, and sound logs that look like either: see
reports/planted-logs.md.

    python -m benchmarks.planted_logs.windows SCRATCH --smollm2 build/real/smollm2 --draws 12 --periods 4 --planted 40

Windows and periods are computed by SmolLM2 (`computed`). The sound logs are drawn from what vLLM and the training path
computed (two runs of `compare` in SCRATCH; without them, from the logs with periods, or what transformers samples of
the demo checkpoint and of SmolLM2), as they are and changed so that the deviation, or how sure the texts are, changes
along the context or with lines of a form. All are judged by the functions that the signatures call, which say what they
found.
"""

import argparse
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.planted_logs import places
from benchmarks.planted_logs.base import Floats, Log, Response, pick, read_run, some
from benchmarks.planted_logs.clean import (
    agreeing_siblings,
    lines_of_a_form,
    noisy_by_length,
    short_answers,
    single_prompt,
)
from benchmarks.planted_logs.computed import SOUND as NO_FAULT
from benchmarks.planted_logs.computed import Fault, scored
from benchmarks.planted_logs.judging import binomial
from benchmarks.planted_logs.logs import NEAR, Random, with_period, with_step
from benchmarks.planted_logs.oracle import disagreement_of, growing_sure, with_coarse_zeros, with_tails
from benchmarks.planted_logs.places import MIXED, Setting, once, sided
from benchmarks.planted_logs.pools import DEMO, sampled_here
from mismatch_probe.verdict.signatures.places import Period, onset_of, period_of

LESS = (0.5, 0.5, 0.25, 1.0)
"""Nats by which keys outside count less."""

Change = Callable[[Random, Log], Log]


def growing(size: Callable[[Floats], Floats], *, is_own: bool = False) -> Change:
    """Rounding of mu, over its middle with pi, times `size` of the share of the longest context, or of a response."""

    def change(random: Random, log: Log) -> Log:
        longest = max(response.places[-1] for response in log)
        made = []
        for response in log:
            share = np.linspace(0, 1, len(response.ids)) if is_own else response.places / longest
            middle = (response.mu + response.pi) / 2
            made.append(replace(response, mu=np.minimum(middle + (response.mu - middle) * size(share), -1e-7)))
        return made

    return change


def changing_text(*, grows_sure: bool) -> Change:
    """Four in five tokens are sure ones before a place of the context and unsure ones behind it, or the other way."""

    def change(random: Random, log: Log) -> Log:
        at = int(np.median([len(response.prompt) for response in log]) + random.integers(15, 60))
        tokens = [token for r in log for token in zip(r.ids, r.mu, r.pi, strict=True)]
        sure, unsure = [t for t in tokens if t[1] > -0.05], [t for t in tokens if t[1] < -0.5]
        made = []
        for response in log:
            kinds = [sure if (place < at) != grows_sure else unsure for place in response.places]
            chosen = [
                (kind if random.random() < 0.8 else tokens)[int(random.integers(len(kind)))] if kind else tokens[0]
                for kind in kinds
            ]
            ids, mu, pi = zip(*chosen, strict=True)
            made.append(Response(response.prompt, list(ids), np.array(mu), np.array(pi)))
        return made

    return change


def lines_of_tokens(num_tasks: int, num_lengths: int) -> Change:
    """Lines of 16, 24 or 32 tokens whose form puts one token, of those that come often, at some of its places; prompts
    of each task have so many lengths. Sizes are those of the token wherever it stood.
    """

    def change(random: Random, log: Log) -> Log:
        sizes = defaultdict(list)
        for response in log:
            for token in zip(response.ids, response.mu, response.pi, strict=True):
                sizes[token[0]].append(token)
        often = [own for own in sizes.values() if len(own) >= 6]
        every = [token for own in sizes.values() for token in own]
        block, share = pick(random, (16, 24, 32)), (0.2, 0.5, 1.0)[pick(random, (0, 1, 2))]
        tasks = [
            [often[pick(random, range(len(often)))] if random.random() < share else every for _ in range(block)]
            for _ in range(num_tasks)
        ]
        begins = random.integers(40, 100, (num_tasks, num_lengths))
        made = []
        for number in range(int(random.integers(12, 48))):
            form, length = tasks[number % num_tasks], begins[number % num_tasks, number // num_tasks % num_lengths]
            tokens = [form[place % block] for place in range(int(random.integers(64, 160)))]
            ids, mu, pi = zip(*(own[int(random.integers(len(own)))] for own in tokens), strict=True)
            made.append(Response([number, *[7] * int(length - 1)], list(ids), np.array(mu), np.array(pi)))
        return made

    return change


SOUND: dict[str, Change] = {
    "as it is": lambda _, log: log,
    "heavy tails": with_tails,
    "zeros of a coarse log-softmax": lambda _, log: with_coarse_zeros(log),
    "rounding that grows by 2.5": growing(lambda share: 1 + 1.5 * share),
    "by 4": growing(lambda share: 1 + 3 * share),
    "by 4, as the root": growing(lambda share: 1 + 3 * np.sqrt(share)),
    "by 3, late": growing(lambda share: 1 + 5 * np.maximum(share - 0.6, 0)),
    "by 3, early": growing(lambda share: 1 + np.minimum(6 * share, 2)),
    "by 4, along each response": growing(lambda share: 1 + 3 * share, is_own=True),
    "by 3, late in each response": growing(lambda share: 1 + 4 * np.maximum(share - 0.5, 0), is_own=True),
    "texts that grow sure": lambda _, log: growing_sure(log),
    "texts that are unsure from a place on": changing_text(grows_sure=False),
    "texts that are sure from a place on": changing_text(grows_sure=True),
    "lines of tokens, prompts of one length": lines_of_tokens(1, 1),
    "lines of tokens, two tasks of one length each": lines_of_tokens(2, 1),
    "lines of tokens, four tasks of one length each": lines_of_tokens(4, 1),
    "lines of tokens, many lengths": lines_of_tokens(1, 20),
}


def of_many_lengths(random: Random, smollm2: Path | None) -> Setting:
    """A setting whose prompts are cut so that hardly two are as long."""
    setting = Setting(random, smollm2)
    setting.prompts = [prompt[int(random.integers(min(24, len(prompt) - 8))) :] for prompt in setting.prompts]
    return setting


def judge_periods(random: Random, setting: Setting, mixed: float) -> Log:
    """A sound log, in which the training path's states hold a part of the one before once in a block, for each block;
    the sound log is handed back.
    """
    log = setting.log(NO_FAULT, NO_FAULT, int(random.integers(2**30)))
    print(f"{setting.words}, sound: {words_on(period_of(disagreement_of(log)))}", flush=True)
    for block in (16, 24, 32, 48):
        phase = int(random.integers(block))
        fault = Fault(block=block, phase=phase, mixed=mixed)
        key = (setting.folder.name, [(response.prompt, response.ids) for response in log], fault)
        moved = once(partial(scores_of, setting.model, log, fault), *key)
        with_fault = [replace(response, pi=pi) for response, pi in zip(log, moved, strict=True)]
        shown = words_on(period_of(disagreement_of(with_fault)))
        print(f"every {block} from {(phase + 1) % block}, {mixed:g} of a state: {shown}", flush=True)
    return log


def scores_of(model: object, log: Log, fault: Fault) -> list[Floats]:
    return [scored(model, response.prompt, response.ids, fault) for response in log]


def words_on(seams: Period | None) -> str:
    return "nothing" if seams is None else f"every {seams.block} from {seams.phase}, {seams.times:.2g} times"


def pools_of(scratch: Path, smollm2: Path, computed: dict[str, Log]) -> dict[str, Log]:
    """What the sound logs are drawn from."""
    if any(computed.values()) and not (scratch / "demo").exists():
        return computed
    kept = scratch / "pools-of-sound-logs.pickle"
    if not kept.exists():
        runs = {name: scratch / name for name in computed}
        read = {name: read_run(run) for name, run in runs.items() if run.exists()}
        here = {"demo": DEMO, "smollm2": smollm2}
        kept.write_bytes(pickle.dumps({name: read.get(name) or sampled_here(here[name]) for name in computed}))
    pools: dict[str, Log] = pickle.loads(kept.read_bytes())
    return pools


def is_accused(log: Log) -> bool:
    disagreement = disagreement_of(log)
    step, seams = onset_of(disagreement), period_of(disagreement)
    if seams is not None:
        print(f"accused: {words_on(seams)}", flush=True)
    if step is not None:
        print(f"accused: place {step.place}, {step.times:.2g} times", flush=True)
    return step is not None or seams is not None


def judge_planted(pools: dict[str, Log], seed: int, draws: int) -> None:
    """Logs with a period or a step, of each pool and strength, by the functions."""
    for name in pools:
        for level, strength in enumerate(("weak", "usual", "strong")):
            periods = steps = 0
            for number in range(draws):
                random = np.random.default_rng([seed, 2, number, level, *name.encode()])
                made = with_period(random, pools, level, (name,))
                seams = period_of(disagreement_of(made.log))
                periods += seams is not None and (seams.block, seams.phase) == made.numbers
                made = with_step(random, pools, level, (name,))
                step = onset_of(disagreement_of(made.log))
                steps += step is not None and abs(step.place - made.numbers[0]) <= NEAR
            print(f"{name}, {strength}: {periods} periods and {steps} steps of {draws} each named with their place")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--smollm2", type=Path, default=Path("build/real/smollm2"))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--periods", type=int, default=0, help="Logs of either model, each with four periods.")
    parser.add_argument("--draws", type=int, default=12, help="Of each kind of sound log, and of either model.")
    parser.add_argument("--planted", type=int, default=0, help="Periods and steps of each strength and model.")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    places._folder[:] = [flags.scratch / "computed"]
    computed: dict[str, Log] = {"demo": [], "smollm2": []}
    for number in range(flags.periods):
        random = np.random.default_rng([flags.seed, 1, number])
        for name, folder in (("demo", None), ("smollm2", flags.smollm2)):
            setting = (of_many_lengths if number % 4 else Setting)(random, folder)
            computed[name] += judge_periods(random, setting, MIXED[0] if folder else MIXED[0] / 4)
    for number in range(flags.windows):
        random = np.random.default_rng([flags.seed, number])
        setting, side, less = Setting(random, flags.smollm2), ("mu", "pi")[number % 2], LESS[number % 4]
        begins = sorted(len(prompt) for prompt in setting.prompts)
        first = int(random.integers(begins[len(begins) // 2] + 16, begins[-1] + setting.tokens - 24))
        log = setting.log(*sided(Fault(window=first, less=less), side), int(random.integers(2**30)))
        onset = onset_of(disagreement_of(log))
        shown = "nothing" if onset is None else f"place {onset.place}, {onset.times:.2g} times"
        print(f"window of {side}, {less:g} nats less, place {first + 1}: {shown}", flush=True)
    pools = pools_of(flags.scratch, flags.smollm2, computed)
    judge_planted(pools, flags.seed, flags.planted)
    accused = total = 0
    for kind, change in SOUND.items():
        for name, pool in pools.items():
            random = np.random.default_rng([flags.seed, *kind.encode(), *name.encode()])
            logs = [change(random, some(random, pool, int(random.integers(16, 90)))) for _ in range(flags.draws)]
            wrong = sum(map(is_accused, logs))
            print(f"{name}, {kind}: {wrong} of {len(logs)} accused", flush=True)
            accused, total = accused + wrong, total + len(logs)
    of_siblings = () if pools is computed else (agreeing_siblings, single_prompt)
    for draw in (lines_of_a_form, noisy_by_length, short_answers, *of_siblings):
        randoms = [
            np.random.default_rng([flags.seed, number, *draw.__name__.encode()]) for number in range(flags.draws)
        ]
        wrong = sum(is_accused(draw(random, pools)) for random in randoms)
        print(f"{draw.__name__.replace('_', ' ')}: {wrong} of {flags.draws} accused", flush=True)
        accused, total = accused + wrong, total + flags.draws
    low, high = binomial(accused, total)
    print(f"sound logs accused: {accused} of {total} [{low:.1%}, {high:.1%}]")


if __name__ == "__main__":
    main()
