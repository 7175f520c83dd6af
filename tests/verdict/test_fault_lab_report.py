"""The fault lab's report: models that are not judged again stay in it, with the day on which they were."""

import json
from pathlib import Path

from benchmarks.fault_lab.publish import publish
from benchmarks.fault_lab.scoring import CleanOutcome, Named, Outcome

PRECISION = Named("precision", "precision", [], "Precision.")


def named(model: str, code: str, strength: str = "x 2") -> Outcome:
    verdict = Named("bug", code, [], "A bug.")
    return Outcome(model, "RoPE base", strength, "training", True, ["positions"], verdict, verdict, verdict)


def clean(model: str) -> CleanOutcome:
    return CleanOutcome(model, "as recorded", "bf16/bf16", PRECISION, PRECISION)


def test_a_model_that_is_judged_again_replaces_its_rows_and_the_others_keep_theirs(tmp_path: Path) -> None:
    publish([named("llama", "positions"), named("demo", "unexplained")], [clean("llama"), clean("demo")], tmp_path)
    path = tmp_path / "fault-lab.json"
    record = json.loads(path.read_text())
    record["judged"] = dict.fromkeys(record["judged"], "2020-02-02")
    path.write_text(json.dumps(record))
    publish([named("demo", "positions")], [clean("demo")], tmp_path)
    report = (tmp_path / "fault-lab.md").read_text()
    assert "at the strengths a user would meet: **2 of 2**" in report
    assert "| llama | 2020-02-02 | 1 of 1 | 1 of 1 | 0 of 1 |" in report
    assert "| demo | 2020-02-02" not in report


def test_a_fault_that_is_judged_alone_leaves_the_models_other_rows_as_they_were(tmp_path: Path) -> None:
    publish([named("demo", "unexplained", "x 2"), named("demo", "positions", "x 50")], [clean("demo")], tmp_path)
    assert "| 1 of 2 | 1 of 2 | 0 of 1 |" in (tmp_path / "fault-lab.md").read_text()
    publish([named("demo", "positions", "x 2")], [], tmp_path)
    assert "| 2 of 2 | 2 of 2 | 0 of 1 |" in (tmp_path / "fault-lab.md").read_text()


def test_saying_that_the_sides_differ_beyond_rounding_names_no_wrong_cause(tmp_path: Path) -> None:
    publish([named("llama", "beyond_format")], [clean("llama")], tmp_path)
    assert "would have been honest: 0 of 1;" in (tmp_path / "fault-lab.md").read_text()
