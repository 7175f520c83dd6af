"""How often the gate is wrong, by gating again and again: simulated samples, or subsets of a real run's responses.

    python -m benchmarks.gate_power [--repeats 400] [--designs 0 1 2] [--few-prompts | --run RUN ...]

The truth is the estimate from 200,000 simulated sequences, or the whole real run. The limit is put so that the truth is
0.95, 1, 1.15 and 1.3 times the limit. "Of four" puts three checks beside it that always pass; "any of four" puts the
limits of four metrics there at once. With several looks the sample is extended while the answer is open. "Paired" sets
two runs on the same simulated tokens against each other, a tenth worse being the limit. With `--few-prompts` many
samples of few prompts are gated that have a scale of their own, with the least number of prompts that a pass needs and
without it. Printed, in percent of gatings: failed / inconclusive / passed.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from benchmarks.coverage import DESIGNS, UNLIKE_PROMPTS, Design, draw
from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import pair_text, read_samples
from mismatch_probe.difference.versus import part_of
from mismatch_probe.dtypes import Dtype
from mismatch_probe.gate.config import GateFile, parse_gate
from mismatch_probe.gate.decide import decide
from mismatch_probe.gate.measure import Evidence, Measurer
from mismatch_probe.records.answers import CheckAnswer
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.sequences import Ints, Sequences, TokenPair

TRUTH_BATCHES, TRUTH_SEQUENCES = 40, 5000
"""Batches, and sequences of each."""
FIRST, LAST = 256, 1024
OVER_LIMIT = (0.95, 1.0, 1.15, 1.3)
CLIP = 5.0
MARGIN = 0.1
CHECKED = ("kl_k3", "abs_logprob_diff")
FAMILY = (*CHECKED, "prob_abs_diff", "logprob_diff_rms")
BYSTANDERS = (
    {"metric": "prob_abs_diff", "clip": CLIP, "max": 0.5},
    {"metric": "token_mult_prob_error", "clip": CLIP, "max": 5.0},
    {"metric": "kl_k2", "clip": CLIP, "max": 10.0},
)
ANY = "any of four"
PAIRED = "256 sequences, paired"
LOOKS = {"256 sequences": FIRST, "256, 512 and 1,024 sequences": LAST}
"""Sequences of the last look."""


@dataclass(frozen=True)
class Plan:
    """What is watched, and how: limits on these metrics at once, beside checks that always pass, up to a last look."""

    watched: str
    looks: str
    limits: tuple[str, ...]
    others: Sequence[dict[str, object]] = ()

    def gate(self, truths: dict[str, float], over: float) -> GateFile:
        checks = [{"metric": name, "clip": CLIP, "max": truths[name] / over} for name in self.limits]
        return _gate(LOOKS[self.looks], [*checks, *self.others])


PLANS = (
    *(Plan(name, "256 sequences", (name,)) for name in CHECKED),
    *(Plan(f"{name}, of four", looks, (name,), BYSTANDERS) for name in CHECKED for looks in LOOKS),
    *(Plan(ANY, looks, FAMILY) for looks in LOOKS),
)

FEW_PROMPTS = (("8 x 32", 32, FIRST), ("32 x 32", 32, LAST), ("64 x 16", 16, LAST), ("64 x 4", 4, FIRST))
"""Prompts and samples of each, samples of a prompt, sequences of the last look."""
LEAST_PROMPTS = {"64 prompts for a pass": 64, "the bounds alone": 1}

Key = tuple[str, str, float]
"""What is watched, the looks, and the truth over the limit."""


@dataclass(frozen=True)
class Source:
    """Where samples come from: the number of a design, or a run and a pair of dtypes."""

    name: str
    design: int | None = None
    run: Path | None = None
    pair: PairName | None = None

    def sample(self, num_sequences: int, random: np.random.Generator) -> TokenPair:
        if self.design is not None:
            return draw(DESIGNS[self.design], num_sequences, random)
        return _chosen(_recorded(self), random.permutation(_recorded(self).sequences.num_sequences)[:num_sequences])

    def truths(self, num_batches: int = TRUTH_BATCHES) -> dict[str, float]:
        if self.design is None:
            return _values(_recorded(self))
        return _truths(DESIGNS[self.design], num_batches)


def _truths(design: Design, num_batches: int = TRUTH_BATCHES) -> dict[str, float]:
    batches = [
        _values(draw(design, TRUTH_SEQUENCES, np.random.default_rng([7, batch]))) for batch in range(num_batches)
    ]
    return {metric: float(np.mean([batch[metric] for batch in batches])) for metric in FAMILY}


@cache
def _recorded(source: Source) -> TokenPair:
    assert source.run is not None
    assert source.pair is not None
    run = RunDirectory(source.run)
    pair = read_samples(run, run.read_manifest())[source.pair].data.pair
    assert pair is not None
    return pair


def _values(pair: TokenPair) -> dict[str, float]:
    clipped = part_of(pair, clip=CLIP)
    assert clipped is not None
    metrics, _ = pair_metrics(clipped, names=FAMILY)
    return {metric: metrics[metric].value for metric in FAMILY}


def _chosen(pair: TokenPair, rows: Ints) -> TokenPair:
    sequences = Sequences.of_lengths(pair.sequences.lengths[rows], pair.sequences.clusters[rows])
    tokens = sequences.spread(pair.sequences.offsets[rows]) + sequences.positions
    return TokenPair(sequences, log_pi=pair.log_pi[tokens], log_mu=pair.log_mu[tokens])


def _gate(last: int, checks: list[dict[str, object]], least_prompts: int = 64) -> GateFile:
    settings = {"min_sequences": FIRST, "max_sequences": last, "min_prompts": least_prompts}
    return parse_gate({"gate": {**settings, "check": checks}}, "a plan")


def _answer(gate: GateFile, sample: Callable[[int], Measurer]) -> CheckAnswer:
    """The answer at the last look that was needed."""
    for look in gate.settings.looks:
        answer = decide(gate, sample(look)).answer
        if answer != "inconclusive":
            return answer
    return "inconclusive"


def gated(
    source: Source, truths: dict[str, float], repeat: int, over_limit: Sequence[float] = OVER_LIMIT
) -> dict[Key, CheckAnswer]:
    """One sample gated with every plan, metric and limit."""
    all_sums = source.sample(LAST, np.random.default_rng([11, repeat]))

    @cache
    def sample(num_sequences: int) -> Measurer:
        return Measurer(
            {(Dtype.BF16, Dtype.BF16): Evidence(_chosen(all_sums, np.arange(num_sequences)), num_sequences)}
        )

    answers = {
        (plan.watched, plan.looks, over): _answer(plan.gate(truths, over), sample)
        for plan in PLANS
        for over in over_limit
    }
    return answers if source.design is None else answers | _paired(DESIGNS[source.design], repeat, over_limit)


def few_prompts_gated(truths: dict[str, float], repeat: int) -> dict[Key, CheckAnswer]:
    """Samples of few prompts gated on each metric."""
    answers: dict[Key, CheckAnswer] = {}
    for number, (name, samples, last) in enumerate(FEW_PROMPTS):
        all_sums = draw(replace(UNLIKE_PROMPTS, samples=samples), last, np.random.default_rng([19, number, repeat]))
        measurers = {
            size: Measurer({(Dtype.BF16, Dtype.BF16): Evidence(_chosen(all_sums, np.arange(size)), size)})
            for size in (FIRST, 2 * FIRST, LAST)
            if size <= last
        }
        for metric in CHECKED:
            for needed, least in LEAST_PROMPTS.items():
                for over in OVER_LIMIT:
                    gate = _gate(last, [{"metric": metric, "clip": CLIP, "max": truths[metric] / over}], least)
                    watched = f"{metric}, {needed}"
                    answers[watched, f"{name}, {len(gate.settings.looks)} looks", over] = _answer(
                        gate, measurers.__getitem__
                    )
    return answers


def _paired(design: Design, repeat: int, over_limit: Sequence[float]) -> dict[Key, CheckAnswer]:
    """A run against a baseline of the same tokens, its metric so many times the baseline's and a tenth more."""
    first, second = (
        draw(design, FIRST, np.random.default_rng([13, repeat]), np.random.default_rng([17, repeat, side]))
        for side in range(2)
    )
    answers: dict[Key, CheckAnswer] = {}
    for metric, power in zip(CHECKED, (0.5, 1.0), strict=True):
        gate = _gate(FIRST, [{"metric": metric, "clip": CLIP, "max_regression": MARGIN}])
        for over in over_limit:
            worse = replace(second, log_pi=second.log_mu + ((1 + MARGIN) * over) ** power * second.diff)
            evidence = Evidence(worse, FIRST, first, "paired")
            answers[metric, PAIRED, over] = decide(gate, Measurer({(Dtype.BF16, Dtype.BF16): evidence})).answer
    return answers


def _sources(runs: Sequence[Path], designs: Sequence[int]) -> Iterator[Source]:
    if not runs:
        yield from (Source(DESIGNS[number].name, design=number) for number in designs)
    for path in runs:
        for name in RunDirectory(path).read_manifest().settings.pairs:
            source = Source(f"{path.name}, {pair_text(name)}", run=path, pair=name)
            if _recorded(source).sequences.num_sequences >= LAST:
                yield source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--run", type=Path, nargs="*", default=[])
    parser.add_argument("--designs", type=int, nargs="+", default=list(range(len(DESIGNS))))
    parser.add_argument("--few-prompts", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    heads = ("sample", "limit on", "looks at", *(f"truth at {over:g}x the limit" for over in OVER_LIMIT))
    print("| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), sep="\n")
    with Pool(options.processes) as pool:
        if options.few_prompts:
            gating = partial(few_prompts_gated, _truths(UNLIKE_PROMPTS))
            _show(UNLIKE_PROMPTS.name, pool.imap_unordered(gating, range(options.repeats)))
            return
        for source in _sources(options.run, options.designs):
            _show(source.name, pool.imap_unordered(partial(gated, source, source.truths()), range(options.repeats)))


def _show(name: str, gatings: Iterable[dict[Key, CheckAnswer]]) -> None:
    answers: dict[Key, Counter[CheckAnswer]] = {}
    for gating in gatings:
        for key, answer in gating.items():
            answers.setdefault(key, Counter())[answer] += 1
    for watched, looks in dict.fromkeys((watched, looks) for watched, looks, _ in answers):
        cells = [_cell(answers[watched, looks, over]) for over in OVER_LIMIT]
        print(f"| {name} | {watched} | {looks} | " + " | ".join(cells) + " |", flush=True)


def _cell(counts: Counter[CheckAnswer]) -> str:
    total = counts.total()
    return " / ".join(f"{100 * counts[answer] / total:.1f}" for answer in ("fail", "inconclusive", "pass"))


if __name__ == "__main__":
    main()
