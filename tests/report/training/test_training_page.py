"""The page of a training run: the answer first, every curve with its numbers, nothing that runs or loads."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.train import (
    CheckpointSettings,
    LoraSettings,
    ObjectiveSettings,
    OptimizerSettings,
    PolicySettings,
    RolloutSettings,
    TaskSettings,
)
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.records.training_run import TrainingDirectory, TrainingSummary
from mismatch_probe.report.answers.train import training_answer
from mismatch_probe.report.training.course import action_words, read_courses
from mismatch_probe.report.training.headline import summarise_course
from mismatch_probe.report.training.page import summarise_training, write_training_report
from mismatch_probe.report.view import Answer
from tests.report.pages import SCRIPTS, drawings, embedded, scripts_of, traces, words
from tests.report.test_hostile import PAYLOADS
from tests.report.test_hostile_documents import assert_acts_not
from tests.report.test_page import parsed
from tests.report.training.training_runs import TrainingSample, firing, training_run

DIAGNOSIS = "The mismatch of the two sides grows with equal weights. Use fp16 or fp32 on both sides."
COLLAPSE = TrainingSample(
    dtype=Dtype.BF16,
    steps=44,
    steps_asked=200,
    outcome=f"stopped: {DIAGNOSIS}",
    grows_at=10,
    overflows=(20, 21),
    changes={44: {"reward/mean": float("nan")}},
    firings=(
        firing(31, ["warn"], guard="mismatch-drift"),
        firing(38, ["skip_update", "resync"]),
        firing(44, ["stop"], value="nan"),
    ),
)


def page_of(folder: Path, *samples: TrainingSample) -> str:
    directories = [training_run(folder / str(number), sample) for number, sample in enumerate(samples)]
    path = folder / "page.html"
    write_training_report(directories, path)
    return path.read_text(encoding="utf-8")


def top_of(folder: Path, *samples: TrainingSample) -> Answer:
    courses = read_courses([training_run(folder / str(number), sample) for number, sample in enumerate(samples)])
    return training_answer([(course, summarise_course(course, "")) for course in courses])


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("clean"), TrainingSample())


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("collapsed"), COLLAPSE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("pair"), TrainingSample(), TrainingSample(dtype=Dtype.BF16))


def headline(page: str) -> str:
    found = re.search(r"<h1>(.*?)</h1>", page, re.DOTALL)
    assert found is not None
    return re.sub(r"<[^>]+>", "", found[1])


def drawing(page: str, anchor: str) -> dict[str, Any]:
    return drawings(page)[f"plot-{anchor}"]


@pytest.mark.parametrize("page", ["clean", "collapsed", "pair"])
def test_the_page_is_well_formed_and_leads_somewhere(page: str, request: pytest.FixtureRequest) -> None:
    found = parsed(request.getfixturevalue(page))
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert set(found.links) <= set(found.ids)


@pytest.mark.parametrize("page", ["clean", "collapsed", "pair"])
def test_nothing_is_loaded_and_nothing_runs(page: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(page)
    assert scripts_of(text) == SCRIPTS
    assert not re.search(r"https?://|@import|url\((?!#)|<img|<link", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("page", ["clean", "collapsed", "pair"])
def test_every_figure_tells_how_to_read_it_and_has_its_numbers(page: str, request: pytest.FixtureRequest) -> None:
    figures = re.findall(r"<figure.*?</figure>", request.getfixturevalue(page), re.DOTALL)
    assert len(figures) >= 5
    for figure in figures:
        assert "<figcaption>How to read it: " in figure
        assert "<table" in figure


@pytest.mark.slow
def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    directory = training_run(tmp_path / "run", COLLAPSE)
    pages = []
    for _ in range(2):
        write_training_report([directory], directory.report_path)
        pages.append(directory.report_path.read_bytes())
    assert pages[0] == pages[1]


def test_a_clean_run_says_so_first(clean: str) -> None:
    assert re.fullmatch(
        r"Finished 60 steps: reward from 0\.\d+ to 0\.9\d+, mismatch \(k3\) from \S+ to \S+ nats a token; "
        r"no guard fired\.",
        headline(clean),
    )
    assert "No guard fired." in clean
    assert "var(--fig-reject)" not in words(drawings(clean))


def test_a_stopped_run_says_why_and_which_guards_fired(collapsed: str) -> None:
    cause = "The mismatch of the two sides grows with equal weights."
    assert headline(collapsed) == f"Guard mismatch-limit stopped the run at step 44 of 200. {cause}"
    assert DIAGNOSIS in collapsed
    assert re.search(r"<dt>Stopped by</dt><dd>mismatch-limit</dd>.*at step 44; guards fired 3 times", collapsed)
    assert "skip the update, send the weights again" in collapsed
    assert "stopped by a guard" in collapsed


def test_a_run_that_was_cut_off_is_called_unfinished(tmp_path: Path) -> None:
    page = page_of(tmp_path, TrainingSample(steps=7, outcome="unfinished"))
    assert headline(page).startswith("Unfinished after step 7 of 60")


def test_a_run_without_a_step_still_has_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, TrainingSample(steps=0, outcome="unfinished"))
    assert headline(page) == "No step is recorded yet."
    assert parsed(page).open == []
    assert "Left out, for too few responses or no deviation to draw: “Reward” and “Mismatch: KL per token”." in page


def test_a_run_of_one_step_has_a_page(tmp_path: Path) -> None:
    assert headline(page_of(tmp_path, TrainingSample(steps=1, outcome="unfinished"))).startswith("Unfinished after")


def test_firings_are_marked_on_the_curve_of_their_metric_and_nowhere_else(collapsed: str) -> None:
    [fired] = traces(drawing(collapsed, "kl"), marker__symbol="diamond-open")
    assert len(fired["x"]) == 2
    assert all(re.match(r"step \d+<br>mismatch-(drift|limit): ", text) for text in fired["hovertext"])
    assert traces(drawing(collapsed, "entropy"), marker__symbol="diamond-open") == []


def test_only_guards_that_changed_the_run_draw_a_line(collapsed: str, clean: str) -> None:
    assert len(drawing(collapsed, "entropy")["layout"]["shapes"]) == 2
    assert "shapes" not in drawing(clean, "entropy")["layout"]


def test_skipped_updates_are_marked_and_counted(collapsed: str, clean: str) -> None:
    [skipped] = traces(drawing(collapsed, "gradient"), marker__color="var(--fig-mask)")
    assert skipped["x"] == [20, 21]
    assert traces(drawing(clean, "gradient"), marker__color="var(--fig-mask)") == []
    assert embedded(collapsed)[0]["skipped_updates"] == 2


def test_values_that_are_not_finite_are_named(collapsed: str, clean: str) -> None:
    assert "Crosses at the top: not finite." in collapsed
    assert "Crosses at the top" not in clean
    assert embedded(collapsed)[0]["metrics"]["reward/mean"]["nonfinite_steps"] == 1


def test_what_never_changes_is_told_in_words(clean: str) -> None:
    assert "The same in every step:" in clean
    assert 'id="plot-weights-clipped"' not in clean


def test_the_cost_of_watching_is_told(clean: str) -> None:
    cost = re.search(r"Watching took (\S+) % \(the probe .* s, .* %, metrics .* %, guards .* %\)\.", clean)
    assert cost is not None
    assert float(cost[1]) == pytest.approx(100 * 0.0802 / 5.69, abs=0.2)


def test_two_runs_share_every_drawing_and_what_differs_is_listed(pair: str) -> None:
    for anchor in ("reward", "kl", "extremes", "gradient"):
        for dtype in ("fp16", "bf16"):
            assert traces(drawing(pair, anchor), line__color=f"var(--fig-{dtype})")
    assert '<ul class="key"' in pair
    assert re.search(r"What differs between the runs.*train_dtype.*fp16.*bf16", pair, re.DOTALL)
    ratio = re.search(r"KL per token of BF16 is (\S+) times that of FP16 \(median over 60 shared steps", pair)
    assert ratio is not None
    assert 30 < float(ratio[1]) < 120


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"fingerprint": "9" * 16, "model": "other"}, "model"),
        ({"problems": "9" * 16}, "the problems themselves"),
        ({"settings": {"task": TaskSettings(source="sums:terms=9")}}, "task"),
        ({"settings": {"objective": ObjectiveSettings(name="gspo")}}, "objective"),
        ({"settings": {"rollout": RolloutSettings(temperature=0.5)}}, "temperature"),
        ({"settings": {"optimizer": OptimizerSettings(learning_rate=1e-5)}}, "learning rate"),
        ({"settings": {"policy": PolicySettings(lora=LoraSettings(rank=4))}}, "LoRA"),
    ],
)
def test_runs_that_do_not_learn_the_same_have_no_ratio_and_say_why(
    tmp_path: Path, change: dict[str, Any], differing: str
) -> None:
    top = top_of(tmp_path, TrainingSample(Dtype.BF16), TrainingSample(Dtype.FP16, **change))
    assert not top.remarks
    assert f"do not learn the same: {' and '.join(row[0] for row in top.table.rows)} ({differing})." in top.footnote


def test_one_step_is_told_as_one(tmp_path: Path) -> None:
    assert top_of(tmp_path, TrainingSample(steps=1)).headline.startswith("Finished 1 step: ")


def test_what_a_guard_asks_for_of_the_rate_is_told_in_words() -> None:
    assert action_words("lower_learning_rate(0.1)") == "multiply the learning rate by 0.1"
    assert action_words("lower_learning_rate(level)") == "lower the learning rate to its level before"
    assert action_words("raise_precision(mu)") == "raise the precision (mu)"
    assert action_words("dance(0.1)") == "dance(0.1)"


@pytest.mark.slow
def test_why_there_is_no_ratio_stands_on_the_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, TrainingSample(Dtype.BF16), TrainingSample(Dtype.FP16, problems="9" * 16))
    assert "times that of" not in page
    assert "No ratio of mismatches where runs do not learn the same" in page


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1, "problems": "9" * 16},
        {"steps_asked": 90},
        {"settings": {"checkpoint": CheckpointSettings(every=7), "policy": PolicySettings(micro_batch_tokens=99)}},
    ],
)
def test_what_changes_nothing_that_is_learnt_leaves_the_ratio(tmp_path: Path, change: dict[str, Any]) -> None:
    top = top_of(tmp_path, TrainingSample(Dtype.BF16), TrainingSample(Dtype.FP16, **change))
    assert re.search(r"KL per token of BF16.* is (\S+) times that of FP16", str(top.remarks))
    assert "No ratio" not in top.footnote


LORA = {"policy": PolicySettings(lora=LoraSettings(rank=4))}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([{}, {"dtype": Dtype.BF16}], ["FP16", "BF16"]),
        ([{}, {"seed": 1}], ["seed 0", "seed 1"]),
        ([{}, {"dtype": Dtype.BF16, "seed": 1}], ["FP16, seed 0", "BF16, seed 1"]),
        ([{"settings": {"objective": ObjectiveSettings(name="gspo")}}, {}], ["gspo", "grpo"]),
        ([{"settings": LORA}, {}], ["LoRA of rank 4", "no LoRA"]),
        ([{"model": "/models/large", "fingerprint": "9"}, {}], ["large", "demo"]),
        ([{"settings": {"rollout": RolloutSettings(temperature=0.5)}}, {}], ["temperature 0.5", "temperature 1"]),
        ([{}, {}], ["0", "1"]),
        ([{}, {"model": "/other/demo", "fingerprint": "9"}], ["0", "1"]),
        ([{}, {"dtype": Dtype.BF16, "seed": 1, "settings": LORA}], ["0", "1"]),
    ],
)
def test_runs_are_named_by_what_differs_and_otherwise_by_their_folders(
    tmp_path: Path, changes: list[dict[str, Any]], names: list[str]
) -> None:
    assert [row[0] for row in top_of(tmp_path, *(TrainingSample(**change) for change in changes)).table.rows] == names


@pytest.mark.slow
def test_runs_that_differ_in_more_than_dtypes_have_no_dtypes_colour(tmp_path: Path) -> None:
    page = page_of(tmp_path, TrainingSample(), TrainingSample(seed=1))
    colours = {trace["line"]["color"] for trace in traces(drawing(page, "reward")) if "color" in trace.get("line", {})}
    assert not colours & {f"var(--fig-{dtype})" for dtype in Dtype}


@pytest.mark.slow
def test_the_headline_of_several_runs_tells_how_they_ended(tmp_path: Path) -> None:
    stopped = replace(COLLAPSE, seed=7)
    assert headline(page_of(tmp_path / "a", TrainingSample(), COLLAPSE, stopped)) == (
        "Of 3 runs 1 finished and 2 were stopped by a guard: BF16, seed 0 at step 44 by mismatch-limit; BF16, seed 7 "
        "at step 44 by mismatch-limit."
    )
    assert re.fullmatch(
        r"All 2 runs finished\. Reward at the end 0\.\d+ \(seed 0\) and 0\.\d+ \(seed 1\)\.",
        headline(page_of(tmp_path / "b", TrainingSample(), TrainingSample(seed=1))),
    )


def test_every_firing_says_where_it_is_pointed_at_what_was_seen_and_what_was_done(collapsed: str) -> None:
    sentences = {
        (trace["marker"]["symbol"], step): text
        for trace in drawing(collapsed, "guards-run-1")["data"]
        for step, text in zip(trace["x"], trace["hovertext"], strict=True)
    }
    assert sentences[("circle-open", 31)].startswith("mismatch-drift, step 31<br>KL (k3) is 0.02")
    assert "skip the update, send the weights again" in sentences[("diamond", 38)]
    assert sentences[("x", 44)].endswith("asked to stop")


def test_a_step_that_a_guard_changed_says_so_in_every_drawing(collapsed: str) -> None:
    for anchor in ("reward", "entropy"):
        [triangles] = traces(drawing(collapsed, anchor), marker__symbol="triangle-down")
        assert triangles["x"] == [38, 44]
        assert "BF16: mismatch-limit asked to skip the update" in triangles["hovertext"][0]


def limited(value: float, **more: Any) -> TrainingSample:
    guard = {"name": "mismatch-limit", "rule": "limit", "metric": "mismatch/kl_k3", "above": value, "below": None}
    return TrainingSample(guards=({**guard, "actions": [["skip_update"], ["stop"]], **more},))


@pytest.mark.slow
def test_the_limit_of_a_guard_is_drawn_where_it_is_near_and_says_what_happens_beyond(tmp_path: Path) -> None:
    [line] = traces(drawing(page_of(tmp_path / "near", limited(1e-5)), "kl"), line__dash="4px,3px")
    assert set(line["y"]) == {1e-5}
    assert set(line["hovertext"]) == {"guard mismatch-limit: above 1.00e-5 it asks to skip the update, then stop"}
    assert not traces(drawing(page_of(tmp_path / "far", limited(1e5)), "kl"), line__dash="4px,3px")


@pytest.mark.parametrize(
    "broken", [{"above": "1e-5"}, {"above": float("nan")}, {"actions": None}, {"rule": None}, {"metric": ["x"]}]
)
def test_a_guard_that_a_stranger_wrote_wrongly_is_not_drawn_and_breaks_no_page(
    tmp_path: Path, broken: dict[str, Any]
) -> None:
    page = page_of(tmp_path, limited(1e-5, **broken))
    assert len(traces(drawing(page, "kl"), line__dash="4px,3px")) == ("actions" in broken)


@pytest.mark.slow
def test_what_a_stranger_wrote_stays_text(tmp_path: Path) -> None:
    hostile = "".join(PAYLOADS.values())
    model = hostile.encode(errors="ignore").decode()
    sample = TrainingSample(model=model, firings=(firing(3, ["warn"], sentence=hostile, guard=hostile),))
    page = page_of(tmp_path, sample)
    assert_acts_not(page)


def test_the_summary_is_embedded_and_is_the_one_of_json(tmp_path: Path) -> None:
    directory = training_run(tmp_path / "run", COLLAPSE)
    [(_, written)] = write_training_report([directory], directory.report_path)
    [summary] = embedded(directory.report_path.read_text(encoding="utf-8"))
    assert TrainingSummary.model_validate(summary) == written == summarise_training(directory)


def test_a_folder_without_a_training_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write_training_report([TrainingDirectory(tmp_path)], tmp_path / "page.html")


@pytest.mark.slow
def test_a_long_run_gives_a_small_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, TrainingSample(steps=2000, steps_asked=2000))
    assert len(page.encode()) < 2_500_000


def test_silent_guards_are_counted(tmp_path: Path) -> None:
    guards = tuple({"name": f"g{number}", "rule": "limit"} for number in range(3))
    silent = top_of(tmp_path / "some", TrainingSample(guards=guards)).tiles[-1]
    assert (silent.value, silent.note) == ("silent", "3 guards on; none saw a reason to act")
    assert top_of(tmp_path / "none", TrainingSample()).tiles[-1].note == "none saw a reason to act"
