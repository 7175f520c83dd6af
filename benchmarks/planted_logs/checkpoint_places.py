"""Faults at places that a model computes itself, seen in a log alone and by its checkpoint: see
reports/planted-logs.md.

    python -m benchmarks.planted_logs.checkpoint_places SCRATCH --model demo --draws 8

Each log is judged by the functions that `import` and `explain` call, which take a second where a command takes minutes:
both sides against each other, and each side against the checkpoint in FP32, without hypotheses. The last column is of
an oracle that knows the side, the law of rounding and of the fault, and the place: by how many nats the log is likelier
with the fault. Without the place it takes the logarithm of the number of places more.
"""

import argparse
import hashlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from benchmarks.planted_logs import places
from benchmarks.planted_logs.base import Floats, Log, Response
from benchmarks.planted_logs.computed import SOUND
from benchmarks.planted_logs.judging import binomial
from benchmarks.planted_logs.oracle import Law, disagreement_of, tokens
from benchmarks.planted_logs.places import AtPlaces, Setting, once
from benchmarks.planted_logs.pools import DEMO, loaded, scored
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.judging import Account, Judge, LoggedTokens
from mismatch_probe.explain.sentences import cause_at_places
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.rounding import Floor
from mismatch_probe.verdict.signatures.places import onset, period

KINDS = ("period", "onset", "window", "end")
LEVELS = ("weak", "usual", "strong")


def exact_log_probs(log: Log, folder: Path) -> Floats:
    """What the checkpoint gives in FP32 [T]."""

    def compute() -> Floats:
        model = loaded(folder, torch.float32)
        return np.concatenate([scored(model, response.prompt, response.ids) for response in log])

    key = hashlib.sha256(repr([(response.prompt, response.ids) for response in log]).encode()).hexdigest()
    values: Floats = once(compute, "declared", folder.name, key)
    return values


def in_format(log: Log, folder: Path) -> Floats:
    """What it gives in BF16 in one pass [T], whose rounding is the floor."""

    def compute() -> Floats:
        return np.concatenate([scored(places.model_of(folder), response.prompt, response.ids) for response in log])

    key = hashlib.sha256(repr([(response.prompt, response.ids) for response in log]).encode()).hexdigest()
    values: Floats = once(compute, "in format", folder.name, key)
    return values


def causes_of(log: Log, folder: Path) -> dict[str, Cause | None]:
    """By the log alone, and of each side by the checkpoint."""
    disagreement = disagreement_of(log)
    causes = {"alone": period(disagreement) or onset(disagreement)}
    exact = exact_log_probs(log, folder)
    floor = Floor.measure(in_format(log, folder) - exact, exact, np.ones(exact.size, dtype=np.bool_))
    logged = LoggedTokens.of([
        LoggedResponse(
            where=str(number), prompt_token_ids=np.array(response.prompt), token_ids=np.array(response.ids),
            sampled=np.ones(len(response.ids), dtype=np.bool_), log_mu=response.mu, log_pi=response.pi,
        )
        for number, response in enumerate(log)
    ])  # fmt: skip
    for side, column in logged.columns.items():
        judge = Judge(column, np.zeros_like(column), logged.rows, logged.sampled)
        causes[side] = cause_at_places(side, logged, judge, Account(exact, floor.at(exact)), Dtype.BF16)
    return causes


def words_on_rounding(log: Log, exact: Floats) -> str:
    mu, pi = (np.concatenate([getattr(response, side) for response in log]) - exact for side in ("mu", "pi"))
    sizes = [float(np.sqrt(np.mean(errors**2))) for errors in (mu, pi, pi - mu)]
    return "mu {:.2g}, pi {:.2g} nats rms from FP32, {:.2g} from each other, ".format(*sizes) + (
        f"correlation {np.corrcoef(mu, pi)[0, 1]:.2f}"
    )


def is_right(cause: Cause | None, log: AtPlaces) -> bool:
    shown = places.numbers_of(log.code, cause.sentence) if cause is not None and cause.code == log.code else []
    return len(shown) == len(log.numbers) and all(n in ok for n, ok in zip(shown, log.numbers, strict=True))


def nats_of_oracle(made: AtPlaces, exact: Floats) -> float:
    """The log-likelihood ratio of the fault at the tokens that it hits; the size of its error there is known."""
    starts = np.cumsum([0, *(len(response.ids) for response in made.log)])
    parts = [exact[start:end] for start, end in pairwise(starts)]
    residuals = [replace(r, mu=part, pi=getattr(r, made.side)) for r, part in zip(made.log, parts, strict=True)]
    before = np.concatenate([response.places for response in made.log]) - 1
    is_hit = made.fault.hits(torch.tensor(before)).numpy()
    if made.fault.window:
        is_hit |= before >= made.fault.window
    mu, z = tokens(residuals)
    rest = mu[~is_hit]
    sound = Response([], [0] * rest.size, rest, rest + z[~is_hit] * np.maximum(1 - np.exp(rest), 1e-6))
    size = float(np.sqrt(max(np.mean(z[is_hit] ** 2) - np.mean(z[~is_hit] ** 2), 1e-12)))
    return float(Law.of([sound]).log_ratio(mu[is_hit], z[is_hit], size).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--model", type=Path, default=Path("demo"))
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--sound", type=int, default=16, help="Sound logs.")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--strengths", nargs="*", choices=LEVELS, default=LEVELS)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    places._folder[:] = [flags.scratch / "computed"]
    smollm2 = None if str(flags.model) == "demo" else flags.model
    folder = smollm2 or DEMO
    accused = dict.fromkeys(("alone", "mu", "pi"), 0)
    for number in range(flags.sound):
        random = np.random.default_rng([flags.seed, number])
        setting = Setting(random, smollm2)
        log = setting.log(SOUND, SOUND, int(random.integers(2**30)))
        print(f"sound log: {words_on_rounding(log, exact_log_probs(log, folder))}", flush=True)
        for who, cause in causes_of(log, folder).items():
            accused[who] += cause is not None
            if cause is not None:
                print(f"sound, accused ({who}): {cause.sentence} {cause.evidence[0]}", flush=True)
    for who, wrong in accused.items():
        print(f"sound, {who}: {wrong} of {flags.sound} accused {binomial(wrong, flags.sound)}", flush=True)
    for kind in flags.kinds:
        for level, strength in enumerate(LEVELS):
            if strength not in flags.strengths:
                continue
            right = dict.fromkeys(("alone", "by the checkpoint", "wrong side"), 0)
            nats = []
            for draw in range(flags.draws):
                random = np.random.default_rng([flags.seed, draw, level, *kind.encode()])
                made = AtPlaces.drawn(kind, random, smollm2, level)
                causes = causes_of(made.log, folder)
                other = {"mu": "pi", "pi": "mu"}[made.side]
                right["alone"] += is_right(causes["alone"], made)
                right["by the checkpoint"] += is_right(causes[made.side], made)
                right["wrong side"] += causes[other] is not None
                nats.append(round(nats_of_oracle(made, exact_log_probs(made.log, folder))))
            words = ", ".join(f"{who} {number} of {flags.draws}" for who, number in right.items())
            print(f"{kind}, {strength}: {words}; nats of the oracle {sorted(nats)}", flush=True)


if __name__ == "__main__":
    main()
