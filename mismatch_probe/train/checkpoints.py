"""Checkpoints: weights and moments of every rank, everything else as JSON, and the model for other programs.

PyTorch's own format describes the tensors in a pickle, which runs whatever code its maker put there.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mismatch_probe.errors import BrokenRecord, StorageError, message_of
from mismatch_probe.records.files import TEMPORARY_PREFIX, require_regular_files, storage_errors, write_text
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.learner import Adjustments, adjustments_of, read_remembered, restoring
from mismatch_probe.train.optimizer import TrainedNetwork
from mismatch_probe.train.policy import Policy

_FILE_BYTES: Final = 2**30
"""The size of a file with all ranks' shares: a rank keeps its share of one file in memory while it writes."""


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, sharded ones share by share; every rank must call it with the same names."""
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_of_each(tensors), save_distributed=True)
    save(dict(tensors), storage_writer=writer)


def read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors with what was written under their names, by however many ranks; every rank must call it."""
    load(dict(tensors), storage_reader=_WholeTensorReader(str(folder)))


class _WholeTensorReader(HuggingFaceStorageReader):
    """A reader that refuses a tensor without a rank's share, which would otherwise keep its old values."""

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            num_stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if num_stored != math.prod(tensor.size):
                raise ValueError(f"{name} has {num_stored} of its {math.prod(tensor.size)} numbers")
        return metadata


def _file_of_each(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The number of the file of each tensor, from 1."""
    files, number, room = {}, 1, _FILE_BYTES
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and room < _FILE_BYTES:
            number, room = number + 1, _FILE_BYTES
        files[name] = number
        room -= size
    return files


_STATE = "state"
_MODEL = "model"
_REST = "trainer.json"
_NetworkStates = Mapping[str, tuple[dict[str, Any], dict[str, Any]]]
"""For each network the weights by name, and the optimizer's moments and settings."""


class Checkpoints:
    """Folders `step-NNNNNN` under one folder: `model/` loads in transformers and vLLM, the rest resumes the run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order."""
        names = (path.name.removeprefix("step-") for path in self._folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def model_path(self, step: int) -> Path:
        return self._step_path(step) / _MODEL

    def save(
        self, step: int, networks: Mapping[str, TrainedNetwork], policy: Policy, tokenizer: Any, rest: dict[str, Any]
    ) -> None:
        """Write the checkpoint of a step completely or not at all, and remove old ones."""
        path = self._step_path(step)
        temporary = path.with_name(TEMPORARY_PREFIX + path.name)
        with _write_then_rename(path, temporary):
            if is_main():
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            dist.barrier()
            write_tensors(temporary / _STATE, _distinct_tensors(networks, _state_of(networks)))
            policy.save(temporary / _MODEL)
            if is_main():
                tokenizer.save_pretrained(temporary / _MODEL)
                write_text(temporary / _REST, json.dumps(rest))
                shutil.rmtree(path, ignore_errors=True)
                temporary.replace(path)
                self._remove_old(rest["last_good_step"])
            dist.barrier()

    def load(self, step: int, networks: Mapping[str, TrainedNetwork]) -> dict[str, Any]:
        """Load weights and moments; returns the rest of the checkpoint.

        Raises:
            BrokenRecord: as `require_readable`.
        """
        self.require_readable(step)
        path = self._step_path(step)
        state = _state_of(networks)
        rest = self._read_rest(step)
        try:
            read_tensors(path / _STATE, _distinct_tensors(networks, state))
        except CheckpointException as error:
            raise _broken_checkpoint(path, error) from error
        for name, part in networks.items():
            weights, moments = state[name]
            set_state_dict(part.module, part.optimizer.adamw, model_state_dict=weights, optim_state_dict=moments)
        return rest

    def require_readable(self, step: int) -> None:
        """Require that a checkpoint can be read, before a model is loaded.

        Raises:
            BrokenRecord: a file of the checkpoint is missing, damaged, no regular file, or in the format of an earlier
                version, which runs code of whoever wrote it.
        """
        path = self._step_path(step)
        require_regular_files(path)
        if any(file.suffix != ".safetensors" for file in (path / _STATE).glob("*")):
            raise BrokenRecord(
                f"the checkpoint {path} is in the format of an earlier version, which runs code of whoever wrote it, "
                f"and is not read: train on from its weights with --model {path / _MODEL} and another --out"
            )
        self._read_rest(step)

    def restoring(self, step: int) -> AbstractContextManager[None]:
        """Names the checkpoint where a part cannot be restored from it; raises as `learner.restoring`."""
        return restoring(self._step_path(step))

    def newest_until(self, step: int) -> int:
        """The newest checkpoint of `step` or one before, or the oldest."""
        steps = self.steps()
        return max((kept_step for kept_step in steps if kept_step <= step), default=steps[0])

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps; every rank must call it."""
        if is_main():
            for number in self.steps():
                if number > step:
                    self._remove_step(number)
        dist.barrier()

    def adjustments(self, step: int) -> Adjustments:
        """The adjustments of guards up to that step."""
        return adjustments_of(self._read_rest(step))

    def earned(self) -> dict[int, list[float]]:
        """The rewards of the steps after each checkpoint, which its weights or little newer ones earned.

        The newest checkpoint records them; an earlier version recorded the mean of the steps before it.
        """
        steps = self.steps()
        earned = self._read_rest(steps[-1]).get("earned") if steps else {}
        if earned is None:
            recent = {step: self._read_rest(step).get("recent_reward") for step in steps}
            return {step: [reward] for step, reward in recent.items() if reward is not None}
        return {int(step): rewards for step, rewards in earned.items() if int(step) in steps and rewards}

    def best(self) -> int | None:
        """The first checkpoint with the largest reward; None where no reward is recorded."""
        earned = self.earned()
        return max(earned, key=lambda step: fmean(earned[step]), default=None)

    def _read_rest(self, step: int) -> dict[str, Any]:
        path = self._step_path(step)
        try:
            return read_remembered(path / _REST)
        except (OSError, ValueError) as error:
            raise _broken_checkpoint(path, error) from error

    def _step_path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def _remove_old(self, last_good_step: int) -> None:
        """Remove old checkpoints, and the rest of a checkpoint that a killed process was writing or removing.

        Two good ones stay, since a rollback that did not help goes further back, and so does the oldest that is not
        good yet, which is the next to become good.
        """
        for leftover in self._folder.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(leftover)
        steps = self.steps()
        good = [step for step in steps if step <= last_good_step]
        keep = {*steps[-self._keep :], self.best(), *(good[-2:] or steps[:1]), *steps[len(good) : len(good) + 1]}
        for step in steps:
            if step not in keep:
                self._remove_step(step)

    def _remove_step(self, step: int) -> None:
        """Remove a checkpoint so that a part of it never looks like a checkpoint."""
        path = self._step_path(step)
        leaving = path.with_name(TEMPORARY_PREFIX + path.name)
        shutil.rmtree(leaving, ignore_errors=True)
        path.replace(leaving)
        shutil.rmtree(leaving)


@contextmanager
def _write_then_rename(path: Path, temporary: Path) -> Iterator[None]:
    """Write to a temporary folder and rename it; where the disk refuses, remove what was written.

    Raises:
        StorageError: the disk refused, as PyTorch, safetensors or Python itself tells it.
    """
    try:
        with storage_errors(path):
            try:
                yield
            except CheckpointException as error:
                failure, _ = next(iter(error.failures.values()))
                raise _system_words(failure) or _storage_error(path, failure) from error
            except SafetensorError as error:
                raise _storage_error(path, error) from error
    except StorageError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _system_words(failure: BaseException | None) -> OSError | None:
    """The operating system's own words, where they caused the failure."""
    while failure is not None and not isinstance(failure, OSError):
        failure = failure.__cause__ or failure.__context__
    return failure


def _storage_error(path: Path, error: BaseException) -> StorageError:
    reason = str(error).splitlines()[0]
    return StorageError(
        f"cannot write {path} whole, as on a full disk ({reason}); free space, or give --out on another disk"
    )


def _state_of(networks: Mapping[str, TrainedNetwork]) -> _NetworkStates:
    return {name: get_state_dict(part.module, part.optimizer.adamw) for name, part in networks.items()}


def _distinct_tensors(networks: Mapping[str, TrainedNetwork], state: _NetworkStates) -> dict[str, torch.Tensor]:
    """Every tensor of a state once: tied weights are stored under one name."""
    tensors: dict[str, torch.Tensor] = {}
    for network, (weights, moments) in state.items():
        module = networks[network].module
        distinct = {name for name, _ in module.named_parameters()}
        tied_names = {name for name, _ in module.named_parameters(remove_duplicate=False)} - distinct
        tensors |= {f"{network}.{name}": weight for name, weight in weights.items() if name not in tied_names}
        for name, of_weight in moments["state"].items():
            tensors |= {f"{network}.{name}@{moment}": tensor for moment, tensor in of_weight.items()}
    return tensors


def _broken_checkpoint(path: Path, error: BaseException) -> BrokenRecord:
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return BrokenRecord(
        f"the checkpoint {path} cannot be read ({type(error).__name__}: {message_of(error)}); "
        "remove it to resume from the one before"
    )
