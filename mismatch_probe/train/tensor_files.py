"""Tensors of a checkpoint on disk: safetensors files that each rank writes its share of, and any number of ranks reads.

PyTorch's own format describes the tensors in a pickle, which runs whatever code its maker put there.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_FILE_BYTES: Final = 2**30
"""Tensors of a file, all ranks' shares together: a rank holds its share of a file in memory while it writes it."""


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, sharded ones share by share; every rank must call it with the same names.

    Raises:
        CheckpointException: a rank could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_of_each(tensors), save_distributed=True)
    save(dict(tensors), storage_writer=writer)


def read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors with what was written under their names, by however many ranks; every rank must call it.

    Raises:
        CheckpointException: a file is missing or damaged, or holds tensors of other names or shapes.
    """
    load(dict(tensors), storage_reader=_WholeTensorReader(str(folder)))


class _WholeTensorReader(HuggingFaceStorageReader):
    """Refuses a tensor that lacks a rank's share, which would be left as it was."""

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if stored != math.prod(tensor.size):
                raise ValueError(f"{name} has {stored} of its {math.prod(tensor.size)} numbers")
        return metadata


def _file_of_each(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Which file each tensor goes to, counted from 1."""
    files, number, room = {}, 1, _FILE_BYTES
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and room < _FILE_BYTES:
            number, room = number + 1, _FILE_BYTES
        files[name] = number
        room -= size
    return files
