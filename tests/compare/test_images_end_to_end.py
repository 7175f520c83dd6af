"""Images in prompts go through `compare` on real vLLM and transformers: both sides see the same pixels."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.images import encode_images
from mismatch_probe.records.legs import read_prompts
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.tables import prompts_of, read_table, sequences_of
from mismatch_probe.training_path.scorer import Scorer
from tests.command_line import FEW, probe
from tests.tiny_models import make_seeing_checkpoint

pytestmark = pytest.mark.slow

OTHER_PIXELS = 'dim:dtype=fp32,mm_processor_kwargs={"do_normalize": false}'


def picture(path: Path, seed: int) -> Path:
    slope = np.linspace(0, 255 * (seed + 1), 40 * 30 * 3).reshape(40, 30, 3)
    noise = np.random.default_rng(seed).integers(0, 60, (40, 30, 3))
    Image.fromarray(((slope + noise) % 256).astype(np.uint8)).save(path)
    return path


def turn(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it? "}, *parts]}]}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    names = [picture(folder / f"{seed}.png", seed).name for seed in range(4)]
    rows = [
        turn({"type": "image", "image": names[0]}),
        turn({"type": "image_url", "image_url": {"url": f"file://{folder / names[1]}"}}),
        turn({"type": "image"}) | {"images": [names[2]]},
        turn({"type": "image", "path": names[3]}, {"type": "image", "path": names[0]}),
        {"messages": [{"role": "user", "content": "No picture."}]},
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def words(seeing: Path, prompts: Path) -> tuple[object, ...]:
    sides = ("--train", "fp32", "--train", "bf16", "--infer", "fp32", "--infer", OTHER_PIXELS)
    return ("--model", seeing, "--prompts", prompts, "--max-new-tokens", 24, "--config", FEW, *sides)


@pytest.fixture(scope="module")
def run(words: Sequence[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    probe("compare", *words, "--out", path, code=ExitCode.PASS)
    return path


def responses(run: Path) -> list[TokenSequence]:
    """Those of the engine in FP32."""
    directory = RunDirectory(run)
    rollouts = read_table(directory.rollouts_path)
    prompts = prompts_of(read_prompts(directory, directory.read_manifest().run_key))
    return [each for each in sequences_of(rollouts, prompts) if each.id.endswith("@infer-fp32")]


def test_both_sides_see_the_same_pixels_and_agree_to_rounding_in_fp32(run: Path) -> None:
    pairs = {(pair["train"], pair["infer"]): pair for pair in json.loads((run / "summary.json").read_text())["pairs"]}
    fp32, bf16 = pairs["fp32", "fp32"], pairs["bf16", "fp32"]
    assert fp32["verdict"]["code"] == "clean"
    assert fp32["metrics"]["kl_k3"]["value"] < 1e-9
    assert bf16["metrics"]["kl_k3"]["value"] > 1e-7
    manifest = RunDirectory(run).read_manifest()
    assert manifest.stages["sample-fp32"].effective_settings["images"]["other_pixels"] == 0


def test_other_pixels_in_the_engine_disagree_and_are_named(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (pair,) = (pair for pair in summary["pairs"] if (pair["train"], pair["infer"]) == ("fp32", "dim"))
    assert (pair["verdict"]["kind"], pair["verdict"]["code"]) == ("bug", "configuration")
    assert pair["metrics"]["abs_logprob_diff"]["value"] > 0.01
    assert any("of 4 of 4 prompts with images" in finding["what"] for finding in summary["preflight"])


def test_placeholders_are_counted_and_shown_as_images(run: Path) -> None:
    images = RunDirectory(run).read_manifest().images
    assert images is not None
    assert (images.num_prompts, images.num_images, images.num_tokens) == (4, 5, 20)
    directory = RunDirectory(run)
    texts = read_prompts(directory, directory.read_manifest().run_key)["text"].to_pylist()
    assert texts[0] == "What is it? [image]>"
    assert texts[-1] == "No picture.>"
    page = (run / "report.html").read_text()
    assert "4 of 5 prompts hold images, 20 image tokens" in page
    assert all(259 not in response.token_ids[:-1] for response in responses(run))


def test_another_image_is_refused_by_its_digest_and_has_other_log_probs(run: Path, seeing: Path) -> None:
    (first, *_) = responses(run)
    assert first.images is not None
    swapped = replace(first.images, paths=[str(Path(first.images.paths[0]).with_name("3.png"))])
    settings = TrainingPathSettings(device="cpu")
    with Scorer.load(seeing, Dtype.FP32, settings) as scorer:
        ((own,),) = scorer.score_together([[first]])
        with pytest.raises(UsageError, match=r"3\.png is another image than when the run was prepared"):
            scorer.score_together([[replace(first, images=swapped)]])
        _, facts = encode_images(seeing, swapped.text, swapped.paths, "a prompt")
        other_pixels = replace(swapped, pixels=facts["pixels"])
        ((other,),) = scorer.score_together([[replace(first, images=other_pixels)]])
    assert np.abs(own.logprobs - other.logprobs).max() > 0.1


def test_a_run_goes_on_with_its_images_and_not_with_others(
    run: Path, words: Sequence[object], prompts: Path, tmp_path: Path
) -> None:
    (run / "legs" / "train-fp32.parquet").unlink()
    probe("compare", *words, "--resume", "--out", run, code=ExitCode.PASS)
    assert (run / "legs" / "train-fp32.parquet").exists()
    content = (prompts.parent / "0.png").read_bytes()
    picture(prompts.parent / "0.png", seed=9)
    answer = probe("compare", *words, "--resume", "--out", run, code=ExitCode.USAGE)
    assert "prompts" in answer.stderr
    (prompts.parent / "0.png").write_bytes(content)
