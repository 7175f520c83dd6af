"""Faults planted in logs, and sound logs, judged by what the commands name: see reports/planted-logs.md.

    python -m benchmarks.planted_logs SCRATCH --smollm2 build/real/smollm2 --draws 5 --publish reports/planted-logs.md

Written from the documents, before the package's code was read. SCRATCH keeps what the logs are drawn from.
"""

import argparse
import json
import re
import shutil
import time
from pathlib import Path

import numpy as np

from benchmarks.planted_logs import checkpoint, choices, curves, dialogues, logs, places, turns
from benchmarks.planted_logs.clean import KINDS, clean, flat_curve
from benchmarks.planted_logs.judging import Named, ask
from benchmarks.planted_logs.logs import Plant, Pools
from benchmarks.planted_logs.pools import all_pools
from benchmarks.planted_logs.publish import publish

LEVELS = ("weak", "usual", "strong")


def planted_faults(scratch: Path, smollm2: Path) -> dict[tuple[int, str], Plant]:
    """By item of the list and name."""
    return {
        **{(1, name): turns.plant(name) for name in turns.BREAKS},
        (2, "constant head"): logs.constant_head,
        **{(2, f"mask {edge}"): logs.mask_edge(edge) for edge in logs.EDGES},
        (3, "period"): logs.period,
        (3, "step at a place"): logs.onset,
        (4, "noise of siblings"): logs.own_noise,
        **{(5, name): choices.token_fault(name) for name in choices.TOKEN_FAULTS},
        (5, "experts a token off"): choices.token_shift,
        (5, "experts a layer off"): choices.layer_shift(scratch / "moe"),
        (5, "token not in its set"): choices.not_in_set,
        (5, "sets a token off"): choices.sets_shifted,
        (5, "not renormalised"): choices.not_renormalised,
        **{(6, name): curves.curve(name) for name in curves.FOLDS},
        **{(6, name): curves.contradiction(name) for name in curves.CONTRADICTIONS},
        (8, "weights that change, recorded"): logs.changing_weights(True),
        (8, "weights that change, not recorded"): logs.changing_weights(False),
        **checkpoint.faults(scratch),
        **places.faults(scratch, smollm2),
        **dialogues.faults(smollm2),
    }


def clean_logs(scratch: Path, smollm2: Path) -> dict[tuple[int, str], Plant]:
    return {
        **{(0, name): clean(name) for name in KINDS},
        (0, "flat curves"): flat_curve,
        **checkpoint.clean_logs(scratch),
        **places.clean_logs(smollm2),
        **dialogues.clean_logs(smollm2),
    }


def run_case(name: str, plant: Plant, pools: Pools, seed: list[int], scratch: Path, level: int) -> dict[str, object]:
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    started = time.process_time()
    planted = plant(random, pools, folder, level)
    if planted.run is not None:
        named = planted.run()
    else:
        answer = ask(folder / "run", "import", planted.source, "--out", folder / "run", *planted.arguments)
        named = planted.judge(answer)
    return {
        "cause": named.cause, "place": named.place, "side": named.side, "planted": planted.words,
        "words": named.words, "seconds": round(time.process_time() - started, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--smollm2", type=Path, default=Path("build/real/smollm2"))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--only", default="", help="Cases whose name this regular expression is found in.")
    parser.add_argument("--strength", choices=LEVELS, help="This strength alone, and no sound logs.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--publish", type=Path)
    parser.add_argument("--minutes", type=float, default=1e9, help="Start no case later than this.")
    flags = parser.parse_args()
    needs_pools = not re.search("computed|sampled:", flags.only)
    pools = all_pools(flags.scratch, flags.smollm2) if needs_pools else {}
    file = flags.scratch / f"cases-{flags.seed}.jsonl"
    done = {tuple(json.loads(line)["key"]) for line in file.read_text().splitlines()} if file.exists() else set()
    began = time.monotonic()
    faults, sound = planted_faults(flags.scratch, flags.smollm2), clean_logs(flags.scratch, flags.smollm2)
    jobs = [
        (item, name, level, draw)
        for draw in range(flags.draws)
        for (item, name) in [*faults, *sound]
        for level in (range(3) if (item, name) in faults else [1])
        if re.search(flags.only, name)
        and (flags.strength is None or ((item, name) in faults and LEVELS[level] == flags.strength))
    ]
    for item, name, level, draw in jobs:
        key = (item, name, LEVELS[level] if (item, name) in faults else "clean", draw)
        if key in done or time.monotonic() - began > 60 * flags.minutes:
            continue
        plant = {**faults, **sound}[item, name]
        seed = [flags.seed, draw, level, *name.encode()]
        row: dict[str, object] = {"key": key}
        try:
            row |= run_case(name, plant, pools, seed, flags.scratch / f"work-{flags.seed}", level)
        except Exception as error:  # noqa: BLE001 - a case that breaks is a case that is not named
            row |= {
                "cause": False,
                "place": None,
                "side": None,
                "planted": "",
                "words": f"{type(error).__name__}: {error}",
            }
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        named = Named(bool(row["cause"]), row["place"], row["side"])  # type: ignore[arg-type]
        print("ok  " if named.all else "FELL", *key, "|", row["planted"], "|", row["words"], flush=True)
    if flags.publish:
        publish([json.loads(line) for line in file.read_text().splitlines()], flags.publish)


if __name__ == "__main__":
    main()
