"""GRPOTrainer over two gloo ranks: one decision on all of them, whichever rank has the fault."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("trl", reason="TRL is not installed")

from tests.warm_python import warm_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RANKS = 2


def train(fault: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank ended with."""
    warm_ranks(RANKS, "tests.other_trainers.trl_on_ranks", fault, folder)
    ranks = [json.loads((folder / f"{fault}-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    assert [rank["ranks"] for rank in ranks] == [RANKS] * RANKS
    assert ranks[0]["decisions"] == ranks[1]["decisions"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    return ranks


def test_sums_are_of_all_ranks_and_a_resumed_run_decides_alike_on_each(tmp_path: Path) -> None:
    sound = train("none", tmp_path)
    assert not any(decision["fired"] for decision in sound[0]["decisions"])
    logged = [float(decision["metrics"]["reward/mean"]) for decision in sound[0]["decisions"]]
    assert logged == pytest.approx(sound[0]["rewards"])
    assert logged[0] == 2.0, "0 to 3 on the first rank, 1 to 4 on the second"
    resumed = train("resumed", tmp_path)
    assert len(resumed[0]["decisions"]) == len(sound[0]["decisions"]) - 2
    assert resumed[0]["state"]["last_step"] == resumed[1]["state"]["last_step"] == sound[0]["state"]["last_step"]
    assert not any(rank["ended"] for rank in (*sound, *resumed))
    state = tmp_path / "checkpoint-2" / "mismatch_probe.json"
    state.write_text(state.read_text(encoding="utf-8")[:100], encoding="utf-8")
    ends = [rank["ended"] for rank in train("resumed", tmp_path)]
    assert ends[0] == ends[1]
    assert f"{state}, the state of the guards, cannot be read: malformed JSON" in ends[0]


@pytest.mark.parametrize(("fault", "guard"), [("reward", "reward-nonfinite"), ("loss", "loss-nonfinite")])
def test_a_fault_of_one_rank_withholds_the_update_of_all_and_ends_the_run(
    fault: str, guard: str, tmp_path: Path
) -> None:
    decisions, weights = (train(fault, tmp_path)[0][name] for name in ("decisions", "weights"))
    assert [guard in decision["fired"] for decision in decisions[:3]] == [False, False, True]
    assert decisions[2]["skip"]
    assert weights[2] != weights[1], "a sound step moves weights"
    assert len(set(weights[2:])) == 1, "no spoiled update was applied on any rank"
    assert decisions[-1]["stop"]
    assert len(decisions) < 8
