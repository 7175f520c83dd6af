"""TRL's GRPOTrainer on the demo checkpoint with vLLM in this process, as both benchmarks beside it run it.

Both engines run eagerly. TRL's in-place weight sync fails on vLLM's CPU build, so it is given this project's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

SAMPLES = 8
LONGEST_PROMPT = 192


def demo_trainer(
    folder: Path,
    *,
    steps: int,
    source: str,
    prompts: int,
    new_tokens: int,
    callbacks: Sequence[Any] = (),
    reward: Callable[..., list[float]] | None = None,
    **config: Any,
) -> Any:
    """A trainer whose files go to `folder`; `config` is added to its GRPOConfig."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from mismatch_probe.config.model import PromptSettings
    from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
    from mismatch_probe.engines.vllm.effective import send_weights
    from mismatch_probe.engines.vllm.worker import WORKER_EXTENSION
    from mismatch_probe.tasks import load_prompts

    def sync(generation: Any) -> None:
        send_weights(generation.llm, generation._iter_named_params(), in_process=True)

    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True, worker_extension_cls=WORKER_EXTENSION)
    vllm_generation.VLLMGeneration.sync_weights = sync
    problems = load_prompts(PromptSettings(source=source, num_prompts=256))
    rows = [{"prompt": [{"role": "user", "content": problem.text}], "answer": problem.answer} for problem in problems]
    settings = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": prompts * SAMPLES,
        "num_generations": SAMPLES,
        "max_completion_length": new_tokens,
        "vllm_max_model_length": new_tokens + LONGEST_PROMPT,
        "learning_rate": 1e-5,
        "max_steps": steps,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "bf16": True,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        **config,
    }
    return GRPOTrainer(
        model=str(DEMO_CHECKPOINT),
        reward_funcs=solved if reward is None else reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        callbacks=list(callbacks),
    )


def solved(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for each sum that is right."""
    from mismatch_probe.tasks import verify

    texts = [completion[0]["content"] for completion in completions]
    return [float(verify("sums", expected, text)) for expected, text in zip(answer, texts, strict=True)]
