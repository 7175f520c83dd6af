"""Prompts given as token ids need no tokenizer; everything else says that it does."""

import json
from pathlib import Path

import pytest

from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.checkpoint import has_tokenizer
from mismatch_probe.tasks import Prompt, encode_prompts, tokenizer_for
from tests.tiny_models import VOCAB_SIZE, byte_tokenizer

IDS = [Prompt("a", token_ids=[3, 1, 2]), Prompt("b", token_ids=[7])]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkpoint's folder without a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_ids_are_taken_as_they_are(bare: Path) -> None:
    assert not has_tokenizer(bare)
    tokenizer = tokenizer_for(IDS, bare)
    assert tokenizer is None
    encoded = encode_prompts(IDS, tokenizer, "auto", VOCAB_SIZE)
    assert [(prompt.prompt_id, prompt.token_ids, prompt.text) for prompt in encoded] == [
        ("a", [3, 1, 2], ""),
        ("b", [7], ""),
    ]


@pytest.mark.parametrize("other", [Prompt("c", text="text"), Prompt("c", messages=[{"role": "user", "content": "x"}])])
def test_one_prompt_of_text_needs_the_tokenizer(bare: Path, other: Prompt) -> None:
    with pytest.raises(UsageError, match=r"the tokenizer of .* cannot be loaded"):
        tokenizer_for([*IDS, other], bare)


def test_a_tokenizer_that_is_there_is_used_and_a_damaged_one_is_no_missing_one(bare: Path) -> None:
    byte_tokenizer().save_pretrained(bare)
    assert tokenizer_for(IDS, bare) is not None
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be loaded"):
        tokenizer_for(IDS, bare)


@pytest.mark.parametrize(
    ("ids", "words"),
    [([], "prompt d has no tokens"), ([VOCAB_SIZE], f"outside the model's vocabulary of {VOCAB_SIZE}")],
)
def test_ids_are_checked_without_a_tokenizer_too(ids: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        encode_prompts([Prompt("d", token_ids=ids)], None, "auto", VOCAB_SIZE)


def test_a_token_without_a_text_is_its_id() -> None:
    assert TokenTexts(None)([5, 6]) == ["<id 5>", "<id 6>"]
