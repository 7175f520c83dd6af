"""A checkpoint's weights in parts: those of one decoder layer, or all the others, read as transformers reads them."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from mismatch_probe.errors import EngineError, UsageError, message_of
from mismatch_probe.notation import write_many
from mismatch_probe.provenance.checkpoint import safetensors_header, weight_files
from mismatch_probe.training_path.loading import maker_of, no_progress_bars

NO_LAYER: Final = -1
"""The number of the part outside the layers: embeddings, the last norm, the head."""

Tensors = dict[str, torch.Tensor]


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers.

    Raises:
        EngineError: the model has no plain list of them.
    """
    number = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList)]
    layers = [children for children in lists if len(children) == number]
    if len(layers) != 1:
        raise EngineError(
            f"{type(model).__name__} cannot be computed layer by layer: its layers stand in no list of their own; "
            "set reference.by_layer = false, or give --reference none"
        )
    return layers[0]


class StoredParts:
    """The tensors of a checkpoint's files by the part that they belong to.

    They are read by transformers' own loading, so that what it renames, stacks (experts) or keeps in FP32 is as in a
    model that is loaded at once.
    """

    def __init__(self, folder: Path, config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> None:
        """dtype: the format to which parameters are cast as they are read."""
        with torch.device("meta"):
            self._shell: PreTrainedModel = maker_of(config).from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        self._folder = folder
        self._dtype = dtype
        layers = layers_of(self._shell)
        self.num_layers = len(layers)
        self._layers_name = next(f"{name}." for name, module in self._shell.named_modules() if module is layers)
        self._loaded_names: set[str] = set()
        self._where = self._files_of_parts()

    def names_without_file(self) -> set[str]:
        """The model's parameters and stored buffers that no file holds."""
        return self._shell.state_dict().keys() - self._loaded_names

    def stored_bytes(self, part: int) -> int:
        """The size of a part in the files."""
        headers = {path: safetensors_header(path) for path in self._where.get(part, {})}
        return sum(
            end - begin
            for path, names in self._where.get(part, {}).items()
            for begin, end in (headers[path][name]["data_offsets"] for name in names)
        )

    def computed_bytes(self, part: int, dtype: torch.dtype) -> int:
        """The size of a part as parameters of the format of computation."""
        return sum(tensor.numel() for tensor in self._shell_tensors(part).values()) * dtype.itemsize

    def read_part(self, part: int, device: torch.device) -> Tensors:
        """The part's parameters and stored buffers on `device`, by the model's names for them.

        Raises:
            UsageError: a file is broken.
            EngineError: transformers cannot convert a weight.
        """
        mapping: Any = get_model_conversion_mapping(self._shell)
        config = LoadStateDictConfig(
            device_map={"": device},
            dtype=self._dtype,
            dtype_plan=self._shell._get_dtype_plan(self._dtype),
            weight_mapping=mapping,
        )
        try:
            with ExitStack() as files, no_progress_bars():
                slices: dict[str, Any] = {}
                for path, names in self._where.get(part, {}).items():
                    file = files.enter_context(safe_open(path, framework="pt", device="cpu"))
                    slices.update((name, file.get_slice(name)) for name in names)
                report, _ = convert_and_load_state_dict_in_model(self._shell, slices, config)
        except SafetensorError as error:
            raise UsageError(
                f"a weight file of {self._folder} is broken ({message_of(error)}); download or write the checkpoint "
                "again"
            ) from error
        wrong = {**dict.fromkeys(map(str, report.mismatched_keys)), **report.conversion_errors}
        if wrong:
            raise EngineError(f"{next(iter(wrong))} of {self._folder} does not fit its config.json; fix the checkpoint")
        return self._detach(part)

    def _detach(self, part: int) -> Tensors:
        """Take the tensors of a part that was read out of the shell."""
        tensors = {name: tensor.detach() for name, tensor in self._shell_tensors(part).items() if not tensor.is_meta}
        for name, tensor in tensors.items():
            set_tensor(self._shell, name, torch.empty_like(tensor, device="meta"))
        return tensors

    def _shell_tensors(self, part: int) -> Tensors:
        state: Tensors = self._shell.state_dict()
        return {name: tensor for name, tensor in state.items() if self._part_of(name) == part}

    def _files_of_parts(self) -> dict[int, dict[Path, list[str]]]:
        """The files of each part, and the names of its tensors in each."""
        mapping = get_model_conversion_mapping(self._shell)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        state, prefix = self._shell.state_dict(), self._shell.base_model_prefix
        places: dict[int, dict[Path, list[str]]] = {}
        for path in weight_files(self._folder):
            for tensor_entry in safetensors_header(path):
                name, _ = rename_source_key(tensor_entry, renamings, converters, prefix, state)
                self._loaded_names.add(name)
                places.setdefault(self._part_of(name), {}).setdefault(path, []).append(tensor_entry)
        return places

    def _part_of(self, name: str) -> int:
        suffix = name.removeprefix(self._layers_name)
        number = suffix.partition(".")[0]
        return int(number) if suffix != name and number.isdigit() else NO_LAYER


def set_tensor(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set the parameter or buffer of that name in the model to the tensor."""
    owner_name, _, own = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if own in owner._parameters:
        owner._parameters[own] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[own] = tensor


def require_no_missing(folder: Path, names: Iterable[str]) -> None:
    """
    Raises:
        UsageError: `names` has weights; no file holds them.
    """
    missing_names = sorted(names)
    if missing_names:
        raise UsageError(
            f"{folder} lacks {write_many(len(missing_names), 'weight')} of its architecture, such as "
            f"{missing_names[0]}, which would be random; give --model a complete causal language model"
        )
