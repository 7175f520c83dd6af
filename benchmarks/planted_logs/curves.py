"""Curves alone: metrics of each step, computed of responses that are drawn anew, as four trainers log them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planted_logs.base import Floats, pick
from benchmarks.planted_logs.judging import Answer, Named, Planted
from benchmarks.planted_logs.logs import Plant, Pools, Random

FOLDS = {"growing": (4.0, 10.0, 100.0), "step": (3.0, 6.0, 30.0), "sawtooth": (4.0, 10.0, 40.0)}
"""How many times the KL is larger at the end, or at the top, at each strength."""


def shape(kind: str, steps: int, fold: float, where: int) -> Floats:
    """The factor of the KL at each step; `where` is the step of the change, or the length of a tooth."""
    time = np.arange(steps)
    if kind == "growing":
        return fold ** np.clip((time - where) / (steps - 1 - where), 0, 1)
    if kind == "step":
        return np.where(time < where, 1.0, fold)
    return fold ** (time % where / (where - 1)) if kind == "sawtooth" else np.ones(steps)


def metrics(random: Random, pools: Pools, factors: Floats) -> list[dict[str, float]]:
    """What a trainer computes of the responses of each step: d of real responses, times the root of the factor."""
    pool = pools[("demo", "smollm2")[pick(random, range(2))]]
    number = int(random.integers(24, 64))
    rows = []
    for factor in factors:
        log = [pool[i] for i in random.integers(len(pool), size=number)]
        d = [np.sqrt(factor) * (response.pi - response.mu) for response in log]
        mu = np.concatenate([response.mu for response in log])
        flat, sums = np.concatenate(d), np.array([errors.sum() for errors in d])
        weights, sequence_weights = np.exp(np.clip(flat, -20, 20)), np.exp(np.clip(sums, -20, 20))
        pi = np.minimum(mu + flat, 0)
        probs = np.abs(np.exp(pi) - np.exp(mu))
        rows.append(
            {
                "kl": -flat.mean(), "k3": (weights - flat - 1).mean(), "abs": np.abs(flat).mean(),
                "abs_max": np.abs(flat).max(), "square": (flat**2).mean(), "std": np.abs(flat).std(),
                "chi2_token": (weights**2).mean() - 1, "chi2_seq": (sequence_weights**2).mean() - 1,
                "ess": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
                "mean": weights.mean(), "deviation": weights.std(), "high": weights.max(), "low": weights.min(),
                "probs": probs.mean(), "probs_max": probs.max(), "probs_std": probs.std(ddof=1),
                "pearson": np.corrcoef(np.exp(pi), np.exp(mu))[0, 1], "tmpe": np.exp(np.abs(flat)).mean(),
                "abs_seq": np.mean([np.abs(errors).mean() for errors in d]),
            }
        )  # fmt: skip
    return [{name: float(value) for name, value in row.items()} for row in rows]


def verl(folder: Path, rows: list[dict[str, float]], ages: list[float] | None) -> Path:
    made = []
    for step, row in enumerate(rows, start=1):
        data = {
            "rollout_corr/rollout_is_mean": row["mean"], "rollout_corr/rollout_is_std": row["deviation"],
            "rollout_corr/rollout_is_max": row["high"], "rollout_corr/rollout_is_min": row["low"],
            "rollout_corr/rollout_is_ratio_fraction_high": 0.0, "rollout_corr/rollout_is_ratio_fraction_low": 0.0,
            "rollout_corr/rollout_is_eff_sample_size": row["ess"], "rollout_corr/kl": row["kl"],
            "rollout_corr/k3_kl": row["k3"], "rollout_corr/chi2_token": row["chi2_token"],
            "rollout_corr/chi2_seq": row["chi2_seq"], "training/rollout_probs_diff_mean": row["probs"],
            "training/rollout_probs_diff_max": row["probs_max"], "training/rollout_probs_diff_std": row["probs_std"],
            "training/rollout_actor_probs_pearson_corr": row["pearson"], "actor/entropy": 0.5,
        }  # fmt: skip
        made.append({"step": step, "data": data})
    return written(folder / "metrics.jsonl", [json.dumps(row) for row in made])


def nemo_rl(folder: Path, rows: list[dict[str, float]], ages: list[float] | None) -> Path:
    names = {"train/gen_kl_error": "k3", "train/token_mult_prob_error": "tmpe"}
    document = {name: {str(step): row[key] for step, row in enumerate(rows, start=1)} for name, key in names.items()}
    return written(folder / "metrics.json", [json.dumps(document, indent=2 if len(rows) % 2 else None)])


def prime_rl(folder: Path, rows: list[dict[str, float]], ages: list[float] | None) -> Path:
    made = []
    for step, row in enumerate(rows, start=1):
        made.append({"step": step, "time": 1.8e9 + step, "optim/lr": 1e-6, "optim/grad_norm": 0.2})
        made.append(
            {"step": step, "time": 1.8e9 + step, "loss/mean": 0.01, "entropy/all/mean": 0.45,
             "mismatch_kl/all/mean": row["k3"], "is_masked/mean": 0.01}
        )  # fmt: skip
        if ages is not None:
            made.append({"step": step, "time": 1.8e9 + step, "off_policy/mean": ages[step - 1]})
    return written(folder / "metrics.jsonl", [json.dumps(row) for row in made])


def slime(folder: Path, rows: list[dict[str, float]], ages: list[float] | None) -> Path:
    made = [
        f"[2026-11-27 13:02:58] model.py:63 - step {step}: {{'train/loss': -0.01, 'train/entropy_loss': 0.41, "
        f"'train/train_rollout_logprob_abs_diff': {row['abs_seq']}, 'train/ois': 1.0, 'train/grad_norm': 0.21, "
        f"'train/step': {step}}}"
        for step, row in enumerate(rows)
    ]
    return written(folder / "console.log", made)


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


WRITERS = (verl, nemo_rl, prime_rl, slime)


def curve(kind: str) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        steps = int(random.integers(40, 160))
        where = (
            min(int(random.integers(5, 13)), steps // 5)
            if kind == "sawtooth"
            else int(random.integers(steps // 5, 3 * steps // 5))
        )
        fold = FOLDS[kind][level]
        rows = metrics(random, pools, shape(kind, steps, fold, where))
        writer = WRITERS[pick(random, range(4))]
        ages = [float(time % where) for time in range(steps)] if kind == "sawtooth" and random.random() < 0.5 else None

        def judge(answer: Answer) -> Named:
            verdict = answer.document.get("verdict", {})
            headline = answer.document.get("headline_curve")
            drawn: dict[str, Any] = next(
                (curve for curve in answer.document.get("curves", []) if curve["name"] == headline), {}
            )
            words = f"{verdict.get('code')}: {verdict.get('sentence')} ({drawn.get('shape_words')})"
            numbers = [int(number) for number in re.findall(r"\d+", str(drawn.get("shape_words")))]
            first = where if writer is slime else where + 1
            place = {
                "growing": True,
                "step": drawn.get("at_step") is not None and abs(drawn["at_step"] - first) <= 1,
                "sawtooth": where in numbers or "oldest" in words,
            }[kind]
            return Named(str(drawn.get("shape")).startswith(kind), place, None, words)

        words = f"{writer.__name__}, {steps} steps, {fold}-fold, at or every {where}, ages {ages is not None}"
        return Planted(writer(folder, rows, ages), judge, words=words)

    return planted


def low_k3(row: dict[str, float], size: float) -> None:
    row["k3"] = row["square"] / 2 / size


def negative_chi(row: dict[str, float], size: float) -> None:
    row["chi2_token"] = -0.01 * size


def high_k3(row: dict[str, float], size: float) -> None:
    row["k3"] = (row["tmpe"] - 1) * size


def wrong_ess(row: dict[str, float], size: float) -> None:
    row["ess"] = row["ess"] / size


CONTRADICTIONS: dict[str, tuple[Any, str]] = {
    "k3 too small": (low_k3, r"k3|KL"),
    "k3 too large": (high_k3, r"k3|KL"),
    "chi-squared below 0": (negative_chi, r"chi-squared"),
    "ESS of other weights": (wrong_ess, r"ESS|effective"),
}


def ours(folder: Path, rows: list[dict[str, float]], ages: list[float] | None) -> Path:
    """Under the names of this tool's own training, which has the mean square too."""
    made = [
        {
            "step": step, "mismatch/abs_logprob_diff": row["abs"], "mismatch/abs_logprob_diff_max": row["abs_max"],
            "mismatch/logprob_diff_rms": row["square"] ** 0.5, "mismatch/kl_k3": row["k3"],
        }
        for step, row in enumerate(rows, start=1)
    ]  # fmt: skip
    return written(folder / "metrics.jsonl", [json.dumps(row) for row in made])


def contradiction(name: str) -> Plant:
    change, pattern = CONTRADICTIONS[name]

    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        steps = int(random.integers(20, 80))
        rows = metrics(random, pools, np.ones(steps))
        size = (1.5, 3.0, 30.0)[level] if change is not low_k3 else (2.5, 8.0, 80.0)[level]
        for row in rows:
            change(row, size)
        writer = {low_k3: ours, high_k3: nemo_rl}.get(change, verl)

        def judge(answer: Answer) -> Named:
            evidence = answer.document.get("verdict", {}).get("evidence", [])
            words = "\n".join([*evidence, answer.text])
            mention = re.search(rf"({pattern}).*(cannot|at least|at most|leave|make it)", words)
            return Named(bool(mention) and bool(evidence), None, None, " / ".join(evidence)[:300] or words[:300])

        return Planted(writer(folder, rows, None), judge, words=f"{writer.__name__}, by {size}, {steps} steps")

    return planted
