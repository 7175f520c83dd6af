"""What is resolved and refused before anything starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.compare.continuation import require_same
from mismatch_probe.compare.cost.earlier import architectures_of
from mismatch_probe.compare.estimates import estimate
from mismatch_probe.compare.preparation import Preparation, prepare
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.errors import RunDirectoryError, UsageError
from mismatch_probe.provenance.environment import decisive_keys
from mismatch_probe.records.manifest import Manifest
from tests.adapters import make_adapter
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "llama")


def prepared(checkpoint: Path, **settings: Any) -> Preparation:
    return prepare(parse_settings(CompareSettings, {"model": {"path": str(checkpoint)}, **settings}))


def test_the_number_of_prompts_is_recorded_as_it_came_out_and_shown_by_a_dry_run(
    tmp_path: Path, checkpoint: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(5)))
    preparation = prepared(checkpoint, prompts={"source": str(path)})
    assert preparation.manifest.settings.prompts.num_prompts == 5
    assert estimate(preparation).num_prompts == 5


def test_engine_arguments_are_recorded_under_their_names_and_in_their_types(checkpoint: Path) -> None:
    by_flag = {"max-num-seqs": "8", "gpu_memory_utilization": "0.50", "enforce_eager": "True"}
    by_file = {"max_num_seqs": 8, "gpu_memory_utilization": 0.5, "enforce_eager": True}
    flag, file = (
        prepared(checkpoint, prompts={"source": "sums:easy", "num_prompts": 1}, engine={"args": args}).manifest
        for args in (by_flag, by_file)
    )
    assert flag.settings.engine.args == by_file
    assert flag.content_keys["settings"] == file.content_keys["settings"]


def test_what_every_checkpoint_computes_is_counted_as_it_is_checked(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3-moe")
    sides = {"infer": [{"name": "large", "dtype": "bf16", "checkpoint": str(other)}], "pairs": [("bf16", "large")]}
    preparation = prepared(checkpoint, prompts={"source": "sums:easy", "num_prompts": 1}, **sides)
    counted = architectures_of(preparation)
    assert preparation.architectures is not None
    assert counted is preparation.architectures.counted
    assert set(counted) == {str(checkpoint), str(other)}
    assert counted == architectures_of(replace(preparation, architectures=None)), "as a job of its own counts"


def test_an_adapter_is_refused_before_anything_starts_and_its_content_is_recorded(
    checkpoint: Path, tmp_path: Path
) -> None:
    prompts = {"source": "sums:easy", "num_prompts": 1}
    plain = prepared(checkpoint, prompts=prompts)
    assert not [key for key in plain.manifest.content_keys if key.startswith("adapter")]
    with pytest.raises(UsageError, match=r"is no adapter: it has no adapter_config\.json"):
        prepared(checkpoint, prompts=prompts, training={"adapter": str(tmp_path)})
    adapter = make_adapter(tmp_path / "adapter", checkpoint)
    sides = {"engine": {"adapter": str(adapter)}, "training": {"adapter": str(adapter), "adapter_merged": True}}
    before = prepared(checkpoint, prompts=prompts, **sides)
    make_adapter(adapter, checkpoint, seed=1)
    after = prepared(checkpoint, prompts=prompts, **sides)
    with pytest.raises(RunDirectoryError, match=r"was made with another adapter .* content"):
        require_same("the run", before.manifest, after.manifest)


@pytest.mark.parametrize("left", [[], ["settings", "model", "prompts"]])
def test_a_run_that_does_not_say_what_it_was_made_with_is_not_continued(checkpoint: Path, left: list[str]) -> None:
    now = prepared(checkpoint, prompts={"source": "sums:easy", "num_prompts": 1}).manifest
    require_same("the run", now, now)
    silent = now.model_copy(update={"content_keys": {name: now.content_keys[name] for name in left}})
    with pytest.raises(RunDirectoryError, match=r"does not say of which .*versions.* it was made"):
        require_same("the run", silent, now)


def test_a_run_of_a_processor_with_other_instruction_sets_is_not_continued(checkpoint: Path) -> None:
    """Processors of one name can have other ones. What an earlier version did not record is not asked for."""
    now = prepared(checkpoint, prompts={"source": "sums:easy", "num_prompts": 1}).manifest
    with pytest.raises(RunDirectoryError, match=r"instruction sets another \(now "):
        require_same("the run", with_hardware(now, now.hardware | {"cpu_instructions": "another"}), now)
    earlier = {name: value for name, value in now.hardware.items() if name != "cpu_instructions"}
    require_same("the run", with_hardware(now, earlier), now)
    with pytest.raises(RunDirectoryError, match=r"cpu = 'another' \(now "):
        require_same("the run", with_hardware(now, earlier | {"cpu": "another"}), now)


def with_hardware(manifest: Manifest, hardware: dict[str, Any]) -> Manifest:
    keys = manifest.content_keys | decisive_keys(manifest.versions, hardware, manifest.environment)
    return manifest.model_copy(update={"hardware": hardware, "content_keys": keys})
