"""TRL's GRPOTrainer: guards see a batch before its update, withhold the update, lower the rate, and end the run.

    from mismatch_probe.adapters.trl import guard

    guard(trainer)          # a GRPOTrainer, before trainer.train()

Every metric joins TRL's own logs. Read in TRL 1.16; where a method that it needs has another name, `guard` says so.
"""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from mismatch_probe.adapters import norm_or_none
from mismatch_probe.errors import BrokenRecord, MismatchProbeError, StorageError, UsageError
from mismatch_probe.guards.answers import Decision
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.probe import Probe
from mismatch_probe.guards.rewards import RewardTotals
from mismatch_probe.guards.sums import Sums
from mismatch_probe.reading import Unreadable, as_object, read_json

Value = TypeVar("Value")

CAN: Final = ("skip", "stop", "lower_learning_rate")
"""What this adapter carries out."""

_LOOKED_INTO: Final = (
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_get_per_token_logps_and_entropies",
    "_get_grad_norm",
    "training_step",
)
_PROBED_RESPONSES: Final = 8
_PROBED_TOKENS: Final = 64

logger = logging.getLogger(__name__)


def guard(trainer: Any, guards: Guards | None = None, *, probe: bool = False) -> Guards:
    """Let guards watch a GRPOTrainer; those of docs/guards.md unless others are given.

    probe: after each weight sync a few tokens of the first batch go through vLLM and the policy, so that an engine that
    was not sent the weights is seen at once; for vLLM in this process (`vllm_mode="colocate"`) that never sleeps.

    Raises:
        UsageError: the trainer is of another class than those supported, or cannot do what is asked.
    """
    missing = [name for name in _LOOKED_INTO if not hasattr(trainer, name)]
    if missing:
        raise UsageError(
            f"this {type(trainer).__name__} has no {', '.join(missing)}, which TRL 1.16's GRPOTrainer has; use that "
            "version, or give the batch to mp.Guards yourself"
        )
    if trainer.is_deepspeed_enabled:
        raise UsageError(
            "DeepSpeed keeps the gradients to itself, so no update can be withheld; use FSDP, or mp.Guards"
        )
    generation = getattr(trainer, "vllm_generation", None)
    if probe and (generation is None or generation.mode != "colocate" or generation.enable_sleep_mode):
        raise UsageError('probe=True needs vllm_mode="colocate" without vllm_enable_sleep_mode; leave one of them out')
    guards = Guards.default(can=CAN) if guards is None else guards
    trainer.add_callback(_GuardCallback(trainer, guards, probes=probe))
    return guards


class _GuardCallback(TrainerCallback):
    """Listens to the trainer's own methods; decides once a batch, before the first optimizer step that learns from it.

    Every rank gathers what all ranks measured, so all decide the same.
    """

    def __init__(self, trainer: Any, guards: Guards, *, probes: bool) -> None:
        self._trainer = trainer
        self._guards = guards
        self._entropies: torch.Tensor | None = None
        self._rewards: torch.Tensor | None = None
        self._batch: Sums | None = None
        self._losses: list[float] = []
        self._grad_norm = float("nan")
        self._decision: Decision | None = None
        self._probed_ids: list[list[int]] = []
        self._probe: list[Probe] | None = None
        self._listen("_get_per_token_logps_and_entropies", self._with_entropies)
        self._listen("_calculate_rewards", self._keep_rewards)
        self._listen("_generate_and_score_completions", self._measure)
        self._listen("training_step", self._keep_loss)
        self._listen("_get_grad_norm", self._keep_grad_norm)
        if probes:
            self._generate = trainer.vllm_generation.generate
            trainer.vllm_generation.generate = self._probe_and_generate

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Guards go on where the run does."""
        content = json.dumps(self._guards.state_dict())
        _of_first_rank(state, lambda: _write(_state_file(args, state), content))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As the first rank's file says, which other machines may lack."""
        state_of_guards = _of_first_rank(state, lambda: _read(_state_file(args, state))) if state.global_step else None
        if state_of_guards is not None:
            self._guards.load_state_dict(state_of_guards)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradients are there and the optimizer has not stepped."""
        loss, grad_norm = (
            float(np.mean(values)) for values in zip(*_of_ranks(self._take_loss_and_norm()), strict=True)
        )
        update_metrics = {
            "loss": loss,
            "grad_norm": norm_or_none(grad_norm),
            "learning_rate": self._trainer.optimizer.param_groups[0]["lr"],
            "loss_scale": self._loss_scale(),
        }
        if self._batch is not None:
            probe, self._probe = self._probe, None
            decision = self._decision = self._guards.observe(self._batch, probe=probe, **update_metrics)
            self._batch = None
        elif self._decision is not None:
            decision = self._guards.observe_update(**update_metrics)
            self._decision = self._decision.followed_by(decision)
        else:
            return
        self._act(decision)
        if self._decision.skip:
            for parameter in kwargs["model"].parameters():
                parameter.grad = None

    def _loss_scale(self) -> float | None:
        """Of FP16, where TRL's scaler leaves out an update whose gradient is not finite; else None."""
        scaler = self._trainer.accelerator.scaler
        return scaler.get_scale() if scaler is not None and scaler.is_enabled() else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._decision is not None and self._decision.stop:
            control.should_training_stop = True
        return control

    def _act(self, decision: Decision) -> None:
        """Act on the decision about this update alone: the rate is lowered once."""
        trainer = self._trainer
        if decision.events:
            logger.warning("%s", decision)
        for name, value in {**decision.metrics, "guards/firings": float(len(decision.events))}.items():
            trainer._metrics["train"][name].append(value)
        if decision.factor != 1:
            trainer.lr_scheduler.base_lrs = [decision.factor * rate for rate in trainer.lr_scheduler.base_lrs]
            for group in trainer.optimizer.param_groups:
                group["lr"] *= decision.factor

    def _listen(self, name: str, hear: Callable[..., Any]) -> None:
        """Have `hear` called in place of a method of the trainer, with that method as its first argument."""
        method = getattr(self._trainer, name)
        setattr(self._trainer, name, lambda *args, **kwargs: hear(method, *args, **kwargs))

    def _with_entropies(self, score: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """The first pass over a batch is pi's before the update; its entropies are asked for as well."""
        if self._rewards is not None or self._entropies is not None or torch.is_grad_enabled():
            return score(model, *args, **kwargs)
        scores = score(model, *args, **{**kwargs, "compute_entropy": True})
        self._entropies = scores[1]
        return scores

    def _keep_rewards(self, calculate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Of all ranks [responses, functions]."""
        self._rewards = calculate(*args, **kwargs)
        return self._rewards

    def _measure(self, generate: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._rewards = self._entropies = None
        output = generate(inputs, *args, **kwargs)
        if self._trainer.model.training:
            self._decision, self._losses = None, []
            own = self._sums_of_update(output)
            self._batch = Sums.of_arrays(_of_ranks(own.to_array()))
            self._choose_probe(output)
        return output

    def _sums_of_update(self, output: dict[str, torch.Tensor]) -> Sums:
        """Of this rank's responses; of all rewards on the first rank, since groups may lie across ranks."""
        mask = output["completion_mask"]
        lengths = mask.sum(1)
        last = output["completion_ids"].gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
        ends = torch.tensor([*self._trainer.eos_token_ids, self._trainer._tokenizer.pad_token_id])
        is_cut = (lengths == 0) | ~torch.isin(last, ends.to(last.device))
        return Batch(
            output.get("old_per_token_logps"),
            output.get("sampling_per_token_logps"),
            mask * output["tool_mask"] if "tool_mask" in output else mask,
            entropy=self._entropies,
            prompt_ids=output["prompt_ids"],
            rewards=self._reward_totals([flag for rank in _of_ranks(is_cut.tolist()) for flag in rank]),
            truncated=is_cut,
        ).measure()

    def _reward_totals(self, is_cut: Sequence[bool]) -> RewardTotals:
        """As TRL adds the functions up; NaN where none of them gave a number. is_cut: of all ranks' responses."""
        rewards = self._rewards
        if rewards is None or not self._trainer.accelerator.is_main_process:
            return RewardTotals()
        total = (rewards * self._trainer.reward_weights.to(rewards.device)).nansum(1)
        total[rewards.isnan().all(1)] = torch.nan
        groups = np.arange(len(total)) // self._trainer.num_generations
        return RewardTotals.of(total.double().cpu().numpy(), groups, np.array(is_cut))

    def _keep_loss(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = train(*args, **kwargs)
        self._losses.append(float(loss))
        return loss

    def _keep_grad_norm(self, norm: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        grad_norm = norm(*args, **kwargs)
        self._grad_norm = float(grad_norm)
        return grad_norm

    def _take_loss_and_norm(self) -> tuple[float, float]:
        """Loss and gradient norm of this update on this rank."""
        loss, self._losses = sum(self._losses), []
        return loss, self._grad_norm

    def _choose_probe(self, output: dict[str, torch.Tensor]) -> None:
        if hasattr(self, "_generate") and not self._probed_ids:
            self._probed_ids = probed_ids(output["completion_ids"].tolist(), output["completion_mask"].sum(1).tolist())
            self._probe = self._score_probe()

    def _probe_and_generate(self, *args: Any, **kwargs: Any) -> Any:
        """The weights were just sent, or ought to be."""
        if self._probed_ids and self._trainer.model.training:
            self._probe = self._score_probe()
        return self._generate(*args, **kwargs)

    def _score_probe(self) -> list[Probe]:
        """The probe's tokens under each rank's engine and the policy."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        answers = self._trainer.vllm_generation.llm.generate(
            [{"prompt_token_ids": ids} for ids in self._probed_ids], sampling_params=sampling, use_tqdm=False
        )
        log_mu = [
            [places[token].logprob for places, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
            for answer, ids in zip(answers, self._probed_ids, strict=True)
        ]
        return [Probe(*sides) for sides in _of_ranks((self._log_pi(), log_mu))]

    @torch.no_grad()
    def _log_pi(self) -> list[list[float]]:
        """At temperature 1, as an engine scores a prompt."""
        trainer, longest = self._trainer, max(map(len, self._probed_ids))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in self._probed_ids], device=trainer.model.device)
        lengths = [len(row) for row in self._probed_ids]
        mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long().to(ids.device)
        temperature, trainer.temperature = trainer.temperature, 1.0
        entropies, self._entropies = self._entropies, torch.empty(0)
        try:
            scores, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest - 1)
        finally:
            trainer.temperature, self._entropies = temperature, entropies
        return [row[: length - 1] for row, length in zip(scores.tolist(), lengths, strict=True)]


def probed_ids(responses: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """The beginnings of a few responses, of two tokens at least; never none, since all ranks probe together."""
    sequences = [list(ids[: min(length, _PROBED_TOKENS)]) for ids, length in zip(responses, lengths, strict=True)]
    return [ids for ids in sequences if len(ids) > 1][:_PROBED_RESPONSES] or [[responses[0][0]] * 2]


def _state_file(args: Any, state: Any) -> Path:
    """The guards' file in the checkpoint of a step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "mismatch_probe.json"


def _read(path: Path) -> dict[str, Any] | None:
    """None where a checkpoint was written without guards.

    Raises:
        BrokenRecord: it is no JSON object.
    """
    try:
        return as_object(read_json(path))
    except FileNotFoundError:
        return None
    except Unreadable as error:
        raise BrokenRecord(
            f"{path}, the state of the guards, cannot be read: {error}; remove it to go on with guards that begin anew"
        ) from error


def _write(path: Path, content: str) -> None:
    """
    Raises:
        StorageError: the disk refused it.
    """
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}, the state of the guards: {error.strerror or error}") from error


def _of_first_rank(state: Any, work: Callable[[], Value]) -> Value:
    """What `work` gives on the first rank, on every rank. Where it fails there, every rank raises its error: none is
    left waiting.
    """
    result: Value | MismatchProbeError | None = None
    if state.is_world_process_zero:
        try:
            result = work()
        except MismatchProbeError as error:
            result = error
    [first, *_] = _of_ranks(result)
    if isinstance(first, MismatchProbeError):
        raise first
    return first  # type: ignore[no-any-return]


def _of_ranks(value: Any) -> list[Any]:
    values: list[Any] = gather_object([value])
    return values
