import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mismatch_probe.engines.token_text import TokenTexts
from tests.tiny_models import byte_tokenizer


@pytest.fixture
def byte_level():
    return byte_tokenizer()


@pytest.fixture
def sentence_piece():
    """A Llama-style vocabulary: spaces as a mark inside the token, bytes as tokens of their own."""
    vocab = {"<unk>": 0, "▁the": 1, "cat": 2, "▁": 3, "<0xE4>": 4, "<0x0A>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_pieces_of_a_byte_level_text_join_to_the_text(byte_level):
    text = " two  spaces\n\tand a tab"
    assert "".join(TokenTexts(byte_level)(byte_level(text)["input_ids"])) == text


@pytest.mark.parametrize("text", ["é", "日本語 🙂", "a👩‍👩‍👧b"])
def test_a_character_of_several_tokens_is_the_text_of_its_last_token(byte_level, text):
    texts = TokenTexts(byte_level)(byte_level(text)["input_ids"])
    assert "".join(texts) == text
    assert len(texts) == len(text.encode())
    assert "\\x" not in "".join(texts)


def test_bytes_that_are_no_utf8_are_escaped(byte_level):
    first, second, letter = byte_level("éa")["input_ids"]
    assert TokenTexts(byte_level)([first, letter]) == ["", "\\xc3a"]
    assert TokenTexts(byte_level)([second, letter]) == ["\\xa9", "a"]
    assert TokenTexts(byte_level)([letter, first]) == ["a", "\\xc3"]
    assert TokenTexts(byte_level)([first, byte_level.eos_token_id]) == ["\\xc3", "</s>"]


def test_a_special_token_shows_its_own_name(byte_level):
    assert TokenTexts(byte_level)([byte_level.eos_token_id]) == ["</s>"]


def test_an_id_beyond_the_vocabulary_is_shown_as_an_id(byte_level):
    assert TokenTexts(byte_level)([300]) == ["<id 300>"]


def test_sentence_piece_tokens_keep_the_space_in_front(sentence_piece):
    assert TokenTexts(sentence_piece)([1, 2, 3]) == [" the", "cat", " "]


def test_a_byte_token_of_sentence_piece_is_a_character_or_an_escape(sentence_piece):
    assert TokenTexts(sentence_piece)([4, 5]) == ["", "\\xe4\n"]
    assert TokenTexts(sentence_piece)([4, 2]) == ["\\xe4", "cat"]
