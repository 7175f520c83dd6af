"""Sound logs of unlike kinds: nothing in them may be accused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.planted_logs import choices, curves, turns
from benchmarks.planted_logs.base import Log, Response, by_prompt, pick, some
from benchmarks.planted_logs.judging import Named, Planted, accusations
from benchmarks.planted_logs.logs import Plant, Pools, Random, drawn, with_tools
from benchmarks.planted_logs.writing import BOTH_SIDES, WITH_TURNS, Write, nemo_gym, plain, vllm_answers

Draw = Callable[[Random, Pools], Log]


def as_it_is(random: Random, pools: Pools) -> Log:
    return drawn(random, pools, 8, 150)


def heavy_tails(random: Random, pools: Pools) -> Log:
    """One token in a hundred is off on one side or the other, as where routers flip."""
    made = []
    for response in drawn(random, pools, 20, 120):
        hit = random.random(len(response.ids)) < 0.01
        error = 0.3 * random.standard_t(2, len(hit)) * (1 - np.exp(response.mu))
        made.append(replace(response, pi=np.minimum(response.pi + hit * error, -1e-7)))
    return made


def real_zeros(random: Random, pools: Pools) -> Log:
    """Top-p: exactly 0 where a token is alone in its nucleus, on both sides."""
    return [replace(response, extra={}) for response in some(random, pools["nucleus"], int(random.integers(20, 100)))]


def coarse_zeros(random: Random, pools: Pools) -> Log:
    """A sampler that gives 0 where it is nearly sure, as one whose log-softmax takes coarse logits."""
    return [
        replace(response, mu=np.where(response.mu > -0.004, 0.0, response.mu))
        for response in drawn(random, pools, 20, 100)
    ]


def kept_sets(random: Random, pools: Pools) -> Log:
    return some(random, pools["nucleus"], int(random.integers(12, 100)))


def greedy(random: Random, pools: Pools) -> Log:
    return some(random, pools["greedy"], int(random.integers(10, 40)))


def tools(random: Random, pools: Pools) -> Log:
    """What tools wrote begins each time with the same words, outside the mask."""
    pool = pools[("demo", "smollm2")[pick(random, range(2))]]
    log = [
        with_tools(random, pool, 0.0 if random.random() < 0.5 else np.nan) for _ in range(int(random.integers(10, 60)))
    ]
    head = random.integers(5, 60, 4).tolist()
    made = []
    for response in log:
        mask = np.array(response.mask)
        start = int(np.flatnonzero(np.diff(mask) == -1)[0]) + 1
        size = min(4, int(np.flatnonzero(mask[start:] == 1)[0]))
        ids = list(response.ids)
        ids[start : start + size] = head[:size]
        made.append(replace(response, ids=ids))
    return made


def sure_heads(random: Random, pools: Pools) -> Log:
    """Each response begins with the same tokens, of which the sampler is sure, exactly so or nearly."""
    head = random.integers(5, 60, int(random.integers(1, 6))).tolist()
    exact = random.random() < 0.5
    made = []
    for response in drawn(random, pools, 12, 100):
        sure = -random.gamma(1.0, 2e-4, len(head))
        mu = np.zeros(len(head)) if exact else sure
        made.append(
            replace(
                response, ids=[*head, *response.ids], mu=np.concatenate([mu, response.mu]),
                pi=np.concatenate([sure * random.uniform(0.8, 1.2), response.pi]),
            )
        )  # fmt: skip
    return made


def agreeing_siblings(random: Random, pools: Pools) -> Log:
    """Siblings share their first tokens bit for bit, some of them all: short answers that are likely."""
    made: Log = []
    for group in [group for group in by_prompt(pools["smollm2"]) if len(group) > 3]:
        first, *others = some(random, group, 4)
        shared = min(*(len(response.ids) - 1 for response in (first, *others)), int(random.integers(4, 40)))
        for number, other in enumerate((first, *others)):
            made.append(
                Response(
                    first.prompt, [*first.ids[:shared], 20 + number, *other.ids[shared + 1 :]],
                    *(np.concatenate([getattr(first, s)[:shared], getattr(other, s)[shared:]]) for s in ("mu", "pi")),
                )
            )  # fmt: skip
    return made


def short_answers(random: Random, pools: Pools) -> Log:
    """One to five tokens, many of them the same."""
    return [response.cut(int(random.integers(1, 6))) for response in drawn(random, pools, 60, 180)]


def single_prompt(random: Random, pools: Pools) -> Log:
    groups = by_prompt(pools["smollm2"]) + by_prompt(pools["demo"])
    return groups[pick(random, range(len(groups)))]


def noisy_by_length(random: Random, pools: Pools) -> Log:
    """Rounding that grows along the response, slowly, on either side."""
    side = ("mu", "pi")[pick(random, range(2))]
    made = []
    for response in drawn(random, pools, 20, 100):
        middle = (response.mu + response.pi) / 2
        grown = (getattr(response, side) - middle) * (1 + 1.5 * response.places / response.places[-1])
        made.append(replace(response, **{side: np.minimum(middle + grown, -1e-7)}))
    return made


def lines_of_a_form(random: Random, pools: Pools) -> Log:
    """Prompts of one length, answers in lines of 16 tokens: what is unsure stands at the same places of each line."""
    pool = pools["smollm2"]
    unsure = [(t, m, p) for r in pool for t, m, p in zip(r.ids, r.mu, r.pi, strict=True) if m < -1.0]
    sure = [(t, m, p) for r in pool for t, m, p in zip(r.ids, r.mu, r.pi, strict=True) if m > -0.05]
    at = set(random.integers(0, 16, 3).tolist())
    made = []
    for index in range(int(random.integers(20, 60))):
        tokens = [unsure[pick(random, range(len(unsure)))] if place % 16 in at else sure[pick(random, range(len(sure)))]
                  for place in range(96)]  # fmt: skip
        ids, mu, pi = zip(*tokens, strict=True)
        made.append(Response([*pool[index % len(pool)].prompt, *[7] * 64][:64], list(ids), np.array(mu), np.array(pi)))
    return made


def steps_of_training(random: Random, pools: Pools) -> Log:
    """Six steps, versions one or two steps old; the policy is no further off for it."""
    return [
        response.with_extra(step=(step := index % 6), weight_version=str(step - int(random.integers(0, 2))))
        for index, response in enumerate(drawn(random, pools, 60, 150))
    ]


def versions_that_change(random: Random, pools: Pools) -> Log:
    """In-flight updates so small that rounding is all there is."""
    made = []
    for response in drawn(random, pools, 20, 80):
        at = max(1, len(response.ids) // 2)
        made.append(
            response.with_extra(
                weight_versions=[["3", 0, at], ["4", at, len(response.ids)]] if len(response.ids) > 1 else None
            )
        )
    return [response if response.extra["weight_versions"] else replace(response, extra={}) for response in made]


def conversations(random: Random, pools: Pools) -> Log:
    """Turns that go on, some trajectories whose last turn is asked twice or begins anew as a sub-agent does."""
    log: Log = []
    for index in range(int(random.integers(10, 30))):
        made, _ = turns.conversation(random, pools["smollm2"], f"t{index}", None)
        extra = random.random()
        if extra < 0.2:
            again = some(random, pools["smollm2"], 1)[0]
            made.append(replace(made[-1], ids=again.ids, mu=again.mu, pi=again.pi))
        elif extra < 0.4:
            other = some(random, pools["smollm2"], 1)[0]
            own = [*other.prompt, *random.integers(5, 400, 6).tolist()]
            made.append(replace(other, prompt=own, extra={"trajectory": f"t{index}"}))
        log += made
    return log


KINDS: dict[str, tuple[Draw, tuple[Write, ...]]] = {
    "as it is": (as_it_is, BOTH_SIDES),
    "heavy tails": (heavy_tails, BOTH_SIDES),
    "zeros of a nucleus": (real_zeros, BOTH_SIDES),
    "zeros of a coarse log-softmax": (coarse_zeros, (plain,)),
    "kept sets": (kept_sets, (plain,)),
    "greedy": (greedy, (plain,)),
    "tools that begin alike": (tools, BOTH_SIDES),
    "sure heads": (sure_heads, BOTH_SIDES),
    "siblings that agree": (agreeing_siblings, BOTH_SIDES),
    "short answers": (short_answers, BOTH_SIDES),
    "one prompt": (single_prompt, (plain,)),
    "rounding that grows": (noisy_by_length, BOTH_SIDES),
    "lines of a form": (lines_of_a_form, BOTH_SIDES),
    "steps and versions": (steps_of_training, (plain,)),
    "versions that change": (versions_that_change, (plain,)),
    "conversations": (conversations, WITH_TURNS),
    "experts": (choices.sound_experts, (plain, nemo_gym, vllm_answers)),
}


def clean(kind: str) -> Plant:
    draw, writers = KINDS[kind]

    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        log = draw(random, pools)
        write = writers[pick(random, range(len(writers)))]
        if write in (nemo_gym, vllm_answers):
            log = [replace(response, pi=np.full(len(response.ids), np.nan)) for response in log]

        def judge(answer: object) -> Named:
            accused = accusations(answer, has_sets=kind == "kept sets")  # type: ignore[arg-type]
            return Named(not accused, None, None, "; ".join(accused)[:400])

        return Planted(write(folder, log), judge, words=f"{write.__name__}, {len(log)} responses")

    return planted


def flat_curve(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
    """A level that stays, under any writer; what remembers its past drifts by half at most."""
    steps = int(random.integers(15, 200))
    wander = np.exp(0.08 * np.convolve(random.standard_normal(steps + 20), 0.8 ** np.arange(20), "valid")[:steps])
    rows = curves.metrics(random, pools, wander if random.random() < 0.5 else np.ones(steps))
    writer = curves.WRITERS[pick(random, range(4))]

    def judge(answer: object) -> Named:
        document = answer.document  # type: ignore[attr-defined]
        moving = [
            f"{entry['name']}: {entry['shape_words']}"
            for entry in document.get("curves", [])
            if str(entry["shape"]).startswith(("growing", "falling", "step", "sawtooth"))
        ]
        verdict = document.get("verdict", {})
        void = "chi-squared of responses"  # an estimate that bad luck makes void, and not the log's fault
        accused = [*moving, *[line for line in verdict.get("evidence", []) if "cannot" in line and void not in line]]
        return Named(not accused, None, None, "; ".join(accused)[:400] or str(verdict.get("code")))

    return Planted(writer(folder, rows, None), judge, words=f"{writer.__name__}, {steps} steps")
