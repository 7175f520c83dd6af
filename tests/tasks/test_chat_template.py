"""A template that comes with a checkpoint may be an attack: it ends within bounds, with one sentence."""

import multiprocessing

import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.tasks import Prompt, encode_prompts, encoding
from tests.tasks.test_encoding import CHAT, HI_MESSAGES, make_tokenizer

LOOP = "{% for _ in range(99999) %}"
ATTACKS = {
    "loops": (3 * LOOP + 3 * "{% endfor %}", "it came to no end within 0.2 s"),
    "loops in the library": ("{{ (10 ** 9) ** (10 ** 9) }}", "it came to no end within 0.2 s|GiB of memory"),
    "writes 30 MB": ("{{ 'x' * 30000000 }}", "it made 30,000,000 characters, more than the 10,000,000"),
    "takes memory": ("{{ ('x' * 3000000000) | length }}", "it needs more than 1 GiB of memory"),
    "doubles": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "it came to no end within 0.2 s|GiB of memory",
    ),
    "half a character": ("{{ '\\ud800' }}", "surrogates not allowed"),
    "raises endlessly": ("{{ raise_exception('x' * 100000000) }}", "x…"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("template", "sentence"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch, template: str, sentence: str) -> None:
    if "no end" in sentence:
        monkeypatch.setattr(encoding, "MOST_SECONDS", 0.2)
    with pytest.raises(
        UsageError, match=rf"chat template failed on prompt row-0 \(.*({sentence}).*chat-template"
    ) as caught:
        encode_prompts([HI_MESSAGES], make_tokenizer(template), "auto")
    assert len(str(caught.value)) < 2000
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_the_bound_is_for_each_conversation_and_not_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST_SECONDS", 0.2)
    work = "{% for a in range(1000) %}{% for b in range(700) %}{% endfor %}{% endfor %}"
    prompts = [Prompt(f"row-{index}", text="Hi") for index in range(20)]
    assert len(encode_prompts(prompts, make_tokenizer(work + CHAT), "auto")) == 20


def test_a_text_has_the_ids_that_the_library_gives_it() -> None:
    tokenizer = make_tokenizer("{{ bos_token }}" + CHAT)
    messages = [{"role": "user", "content": "<s> é\u2028🙂\n"}]
    [encoded] = encode_prompts([Prompt("row-0", messages=messages)], tokenizer, "auto")
    assert encoded.token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.slow
def test_a_long_text_is_read_only_until_it_cannot_fit() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(UsageError, match=r"row-0 has 50000000 characters, and the first 800 alone are 800 tokens"):
        encode_prompts([Prompt("row-0", text="x" * 50_000_000)], tokenizer, "never", context_length=100)
    with pytest.raises(UsageError, match=r"has 5000001 characters, and the first 800 alone"):
        encode_prompts([Prompt("row-0", text="x" * 4_999_991)], make_tokenizer(CHAT), "auto", context_length=100)
