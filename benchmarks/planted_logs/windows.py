"""Windows whose keys outside count a little less, and sound logs that look like them: see reports/planted-logs.md.

    python -m benchmarks.planted_logs.windows SCRATCH --smollm2 build/real/smollm2 --draws 12

The windows are computed by SmolLM2 (`computed`); the sound logs are drawn from what vLLM and the training path computed
(two runs of `compare` in SCRATCH), as they are and changed so that the deviation, or how sure the texts are, changes
along the context. All are judged by the function that the signature calls, which says what it found.
"""

import argparse
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.planted_logs import places
from benchmarks.planted_logs.base import Floats, Log, Response, read_run, some
from benchmarks.planted_logs.clean import (
    agreeing_siblings,
    lines_of_a_form,
    noisy_by_length,
    short_answers,
    single_prompt,
)
from benchmarks.planted_logs.computed import Fault
from benchmarks.planted_logs.judging import binomial
from benchmarks.planted_logs.logs import Random
from benchmarks.planted_logs.oracle import disagreement_of, growing_sure, with_coarse_zeros, with_tails
from mismatch_probe.verdict.signatures.places import onset_of

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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--smollm2", type=Path, default=Path("build/real/smollm2"))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--draws", type=int, default=12, help="Of each kind of sound log, and of either model.")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    places._folder[:] = [flags.scratch / "computed"]
    for number in range(flags.windows):
        random = np.random.default_rng([flags.seed, number])
        setting, side, less = places.Setting(random, flags.smollm2), ("mu", "pi")[number % 2], LESS[number % 4]
        begins = sorted(len(prompt) for prompt in setting.prompts)
        first = int(random.integers(begins[len(begins) // 2] + 16, begins[-1] + setting.tokens - 24))
        log = setting.log(*places.sided(Fault(window=first, less=less), side), int(random.integers(2**30)))
        onset = onset_of(disagreement_of(log))
        shown = "nothing" if onset is None else f"place {onset.place}, {onset.times:.2g} times"
        print(f"window of {side}, {less:g} nats less, place {first + 1}: {shown}", flush=True)
    kept = flags.scratch / "vllm.pickle"
    if not kept.exists():
        kept.write_bytes(pickle.dumps({name: read_run(flags.scratch / name) for name in ("demo", "smollm2")}))
    pools: dict[str, Log] = pickle.loads(kept.read_bytes())
    accused = total = 0
    for kind, change in SOUND.items():
        for name, pool in pools.items():
            random = np.random.default_rng([flags.seed, *kind.encode(), *name.encode()])
            logs = [change(random, some(random, pool, int(random.integers(16, 90)))) for _ in range(flags.draws)]
            wrong = sum(onset_of(disagreement_of(log)) is not None for log in logs)
            print(f"{name}, {kind}: {wrong} of {len(logs)} accused", flush=True)
            accused, total = accused + wrong, total + len(logs)
    for draw in (lines_of_a_form, noisy_by_length, agreeing_siblings, short_answers, single_prompt):
        randoms = [
            np.random.default_rng([flags.seed, number, *draw.__name__.encode()]) for number in range(flags.draws)
        ]
        wrong = sum(onset_of(disagreement_of(draw(random, pools))) is not None for random in randoms)
        print(f"{draw.__name__.replace('_', ' ')}: {wrong} of {flags.draws} accused", flush=True)
        accused, total = accused + wrong, total + flags.draws
    low, high = binomial(accused, total)
    print(f"sound logs accused: {accused} of {total} [{low:.1%}, {high:.1%}]")


if __name__ == "__main__":
    main()
