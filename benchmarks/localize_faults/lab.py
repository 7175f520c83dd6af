"""One architecture: both sides recorded with and without each fault, and what `localize` makes of each trial."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.localize_faults.faults import Fault, draw, in_transformers, in_vllm
from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import EngineSettings, ModelSettings, SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import start_engine
from mismatch_probe.engines.vllm.inside import record_activations as record_engine
from mismatch_probe.engines.vllm.outputs import infer_names
from mismatch_probe.localize.run import place_errors
from mismatch_probe.localize.suspects import PlaceNames, find_suspects
from mismatch_probe.records.activations import (
    INFER,
    TRAIN,
    ActivationBatch,
    ActivationStore,
    key,
    plan_activation_batches,
)
from mismatch_probe.records.findings import Suspect
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest, TokenSequence
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.sequences import Sequences
from mismatch_probe.training_path.inside.recording import record_activations as record_training
from mismatch_probe.training_path.inside.reference_walk import ReferenceWalk
from mismatch_probe.training_path.precision import load_reference_model, load_training_model, undivided_modules

NUM_PROMPTS = 12
NEW_TOKENS = 56
REAL_PROMPTS = 4
REAL_NEW_TOKENS = 40
BATCH_TOKENS = 1024
LOGIT_ROWS = 100_000
SAMPLED = "sequences.json"
"""A file that tells that the engine's side is recorded."""


@dataclass(frozen=True)
class Trial:
    """A planted fault (None: nothing was planted), and what was named."""

    model: str
    side: str
    fault: Fault | None
    suspects: list[Suspect]

    @property
    def is_localized(self) -> bool:
        """Something is named, nothing else than what was planted is, and every layer of it."""
        if self.fault is None or not self.suspects:
            return False
        return all(_matches(self.fault, suspect) for suspect in self.suspects)


def _matches(fault: Fault, suspect: Suspect) -> bool:
    if fault.kind == "layer":
        return suspect.layers == [fault.layer]
    if fault.kind == "row":
        return suspect.place == "lm_head" and suspect.channel == int(fault.place.partition(":")[2])
    if fault.kind == "epsilons":
        return suspect.place.endswith("norm")
    same_place = suspect.place.partition("[")[0] == fault.place
    return same_place and (suspect.layers == [fault.layer] if fault.layer is not None else len(suspect.layers) > 0)


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and how many tokens each response has."""

    prompts: list[list[int]]
    new_tokens: int

    @classmethod
    def of_random_ids(cls, before: list[int]) -> Self:
        """before: what each prompt begins with."""
        random = np.random.default_rng(0)
        return cls([before + random.integers(3, 250, 5 + i).tolist() for i in range(NUM_PROMPTS)], NEW_TOKENS)

    @classmethod
    def of_chats(cls, folder: Path, prompts: Path, num_prompts: int, new_tokens: int) -> Self:
        """The first prompts of a file, as a real checkpoint's own template writes them."""
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()[:num_prompts]]
        if not tokenizer.chat_template:
            return cls([tokenizer(text).input_ids for text in texts], new_tokens)
        chats = [[{"role": "user", "content": text}] for text in texts]
        return cls(
            [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats],
            new_tokens,
        )


def run_model(
    model: str, folder: Path, scratch: Path, kinds: list[tuple[str, float]], seeds: Iterable[int], workload: Workload
) -> list[Trial]:
    """Every kind and strength on each side, at a random place of each seed; and nothing planted. What an earlier call
    with the same plan left in `scratch` is not done again.
    """
    config = json.loads((folder / "config.json").read_text())
    sizes: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "moe": "num_experts_per_tok" in config,
        "vocab_size": config["vocab_size"],
    }
    faults = [draw(kind, size, seed, **sizes) for kind, size in kinds for seed in seeds]
    plan, results = scratch / "plan.json", scratch / "results.jsonl"
    planned = json.dumps(
        {"folder": str(folder), "faults": [asdict(fault) for fault in faults], "workload": asdict(workload)}
    )
    if not (scratch / SAMPLED).exists() or plan.read_text() != planned:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        plan.write_text(planned)
        subprocess.run([sys.executable, "-m", "benchmarks.localize_faults.lab", "engine", str(scratch)], check=True)
    subprocess.run([sys.executable, "-m", "benchmarks.localize_faults.lab", "training", str(scratch)], check=True)
    return trials_in(results, model)


def trials_in(results: Path, model: str) -> list[Trial]:
    """What is done so far."""
    return [
        Trial(
            model,
            result["side"],
            None if result["fault"] is None else Fault(**result["fault"]),
            [Suspect.model_validate(suspect) for suspect in result["suspects"]],
        )
        for result in map(json.loads, results.read_text().splitlines())
    ]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}


def _engine(scratch: Path) -> None:
    plan = json.loads((scratch / "plan.json").read_text())
    folder, store = Path(plan["folder"]), ActivationStore(scratch)
    workload = Workload(**plan["workload"])
    sampling = SamplingSettings(max_new_tokens=workload.new_tokens, ignore_eos=True)
    prompts = [EncodedPrompt(f"p{number}", token_ids, "") for number, token_ids in enumerate(workload.prompts)]
    settings = EngineSettings(args={"enforce_eager": True})
    longest = max(map(len, workload.prompts)) + workload.new_tokens + 1
    with start_engine(str(folder), Dtype.BF16, settings, sampling, max_model_len=longest) as engine:
        sampled = engine.sample(
            [SampleRequest(prompt.prompt_id, prompt, i) for i, prompt in enumerate(prompts)], sampling
        )
        sequences = [response.sequence for response in sampled]
        batches = _batches(sequences)
        layout, _ = record_engine(engine, batches, store, modules=True)
        weights = _weights(folder)
        for number, fault in enumerate(Fault(**item) for item in plan["faults"]):
            with in_vllm(fault, engine, weights, _mean_square(fault, store, INFER)):
                record_engine(engine, batches, store, modules=True, side=f"infer-{number}")
    saved = {"layer_paths": layout["layer_paths"], "names": infer_names(layout)}
    rows = [[sequence.prompt_token_ids, sequence.token_ids] for sequence in sequences]
    (scratch / SAMPLED).write_text(json.dumps({"layout": saved, "rows": rows}))


def _training(scratch: Path) -> None:
    plan = json.loads((scratch / "plan.json").read_text())
    plan_of_sampling = json.loads((scratch / SAMPLED).read_text())
    folder, store = Path(plan["folder"]), ActivationStore(scratch)
    faults = [Fault(**item) for item in plan["faults"]]
    batches = _batches([TokenSequence(f"p{i}", *row) for i, row in enumerate(plan_of_sampling["rows"])])
    cpu = torch.device("cpu")
    model, arithmetic = load_training_model(folder, Dtype.BF16, TrainingPathSettings(), cpu, trust_remote_code=False)
    record_training(model, arithmetic, batches, store, modules=True)
    weights = _weights(folder)
    layers = undivided_modules(model)
    paths = [path for path, module in model.named_modules() if module in layers]
    names = PlaceNames.of({"layer_paths": paths}, plan_of_sampling["layout"])
    reference, exact, _ = load_reference_model(
        folder, Dtype.FP32, TrainingPathSettings(), cpu, rounded_to=None, trust_remote_code=False
    )
    combinations: list[tuple[str, Fault | None, tuple[str, str]]] = [("none", None, (INFER, TRAIN))]
    for number, fault in enumerate(faults):
        combinations += [("infer", fault, (f"infer-{number}", TRAIN)), ("train", fault, (INFER, f"train-{number}"))]
    results = scratch / "results.jsonl"
    num_done = len(results.read_text().splitlines()) if results.exists() else 0
    for side, planted, sides in combinations[num_done:]:
        if planted is not None and side == "train":
            with in_transformers(planted, model, weights, _mean_square(planted, store, TRAIN)):
                record_training(model, arithmetic, batches, store, modules=True, side=sides[1])
        walk = ReferenceWalk(reference, exact, store, modules=True, sides=sides)
        walk.run(batches)
        suspects = [suspect.model_dump(mode="json") for suspect in _suspects(walk, batches, names)]
        result = {"side": side, "fault": None if planted is None else asdict(planted), "suspects": suspects}
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        what = "nothing planted" if planted is None else f"{planted.label} in {side}, {planted.layer} {planted.place}"
        print(f"{what}: {[(suspect['place'], suspect['layers']) for suspect in suspects]}", flush=True)
        for faulty in set(sides) - {INFER, TRAIN}:
            shutil.rmtree(scratch / faulty)


def _suspects(walk: ReferenceWalk, batches: list[ActivationBatch], names: PlaceNames) -> list[Suspect]:
    counts = [count for batch in batches for count in batch.rows_per_sequence]
    places = walk.places()
    settings = LocalizeSettings(model=ModelSettings(path="planted"))
    errors = place_errors(places, Estimator(Sequences.of_lengths(counts)), names, settings)
    return find_suspects(places, errors, Dtype.BF16, Dtype.BF16)


def _mean_square(fault: Fault, store: ActivationStore, side: str) -> float:
    """Of what a norm is given where nothing is planted; 0 for other faults."""
    if fault.kind != "epsilon":
        return 0.0
    tensors = load_file(store.file(side, 0, fault.layer))
    return float(tensors[key(fault.place, "in0")].float().square().mean(dim=1).median())


def _batches(sequences: list[TokenSequence]) -> list[ActivationBatch]:
    return plan_activation_batches(sequences, batch_tokens=BATCH_TOKENS, logit_rows=LOGIT_ROWS)


if __name__ == "__main__":
    {"engine": _engine, "training": _training}[sys.argv[1]](Path(sys.argv[2]))
