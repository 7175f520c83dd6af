import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks import Prompt, check_lengths, encode_prompts

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[go]{% endif %}"
)
BOS_CHAT = "{{ bos_token }}" + CHAT


def make_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte a token, with a BOS put before every text that is encoded plainly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": 0, **{byte: index for index, byte in enumerate(alphabet, 1)}}, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=chat_template)


def text_of(prompt: Prompt, chat_template: str | None, mode: str) -> str:
    [encoded] = encode_prompts([prompt], make_tokenizer(chat_template), mode)
    return encoded.text


HI = Prompt("row-0", text="Hi")
HI_MESSAGES = Prompt("row-0", messages=[{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("chat_template", "mode", "text"),
    [
        (CHAT, "auto", "[user]Hi[go]"),
        (CHAT, "always", "[user]Hi[go]"),
        (CHAT, "never", "<s>Hi"),
        (None, "auto", "<s>Hi"),
        (None, "never", "<s>Hi"),
    ],
)
def test_text_is_wrapped_exactly_where_the_setting_and_the_tokenizer_say_so(chat_template, mode, text):
    assert text_of(HI, chat_template, mode) == text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_messages_take_the_chat_template_once(mode):
    assert text_of(HI_MESSAGES, CHAT, mode) == "[user]Hi[go]"


@pytest.mark.slow
def test_a_template_that_writes_the_bos_gets_no_second_one():
    assert text_of(HI_MESSAGES, BOS_CHAT, "auto") == "<s>[user]Hi[go]"


def test_plain_text_that_starts_with_the_bos_gets_no_second_one():
    assert text_of(Prompt("row-0", text="<s>Hi"), None, "never") == "<s>Hi"


def test_text_that_was_templated_before_is_not_templated_again():
    rendered = Prompt("row-0", text="<s>[user]Hi[go]")
    assert text_of(rendered, BOS_CHAT, "never") == rendered.text
    with pytest.raises(UsageError, match=r"second chat template.*--chat-template never"):
        text_of(rendered, BOS_CHAT, "auto")


def test_recorded_ids_pass_unchanged_and_are_checked_against_the_vocabulary():
    tokenizer = make_tokenizer(CHAT)
    [encoded] = encode_prompts([Prompt("row-0", token_ids=[5, 0, 256])], tokenizer, "auto")
    assert encoded.token_ids == [5, 0, 256]
    with pytest.raises(UsageError, match="token id 257, outside the model's vocabulary of 257"):
        encode_prompts([Prompt("row-0", token_ids=[257])], tokenizer, "auto")


def test_the_answer_and_the_id_travel_with_the_ids():
    [encoded] = encode_prompts([Prompt("sums-7", text="Hi", answer="4")], make_tokenizer(), "auto")
    assert (encoded.prompt_id, encoded.answer) == ("sums-7", "4")


@pytest.mark.parametrize(("prompt", "mode"), [(HI, "always"), (HI_MESSAGES, "auto")])
def test_a_tokenizer_without_a_template_refuses_what_needs_one(prompt, mode):
    with pytest.raises(UsageError, match=r"has no chat template.*--chat-template never"):
        text_of(prompt, None, mode)


def test_messages_are_refused_where_templates_are_off():
    with pytest.raises(UsageError, match="--chat-template auto"):
        text_of(HI_MESSAGES, CHAT, "never")


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0]['content'] + 1 }}", "{{ 1 / 0 }}", "{% for %}"],
)
def test_a_template_that_fails_is_one_sentence_with_the_way_round_it(template):
    with pytest.raises(UsageError, match=r"chat template failed on prompt row-0 .*--chat-template never"):
        text_of(HI_MESSAGES, template, "auto")


def test_a_prompt_without_tokens_is_named():
    with pytest.raises(UsageError, match="prompt row-0 has no tokens"):
        encode_prompts([Prompt("row-0", token_ids=[])], make_tokenizer(), "auto")


def encoded(prompt_id: str, num_tokens: int) -> EncodedPrompt:
    return EncodedPrompt(prompt_id, [1] * num_tokens, "")


def test_prompts_that_just_fit_into_the_context_pass():
    check_lengths([encoded("row-0", 24), encoded("row-1", 3)], max_new_tokens=1000, context_length=1024)
    check_lengths([encoded("row-0", 10**6)], max_new_tokens=1000, context_length=None)


def test_the_longest_prompt_that_does_not_fit_is_named_with_the_tokens_it_may_ask_for():
    prompts = [encoded("row-0", 24), encoded("row-1", 25), encoded("row-2", 1)]
    with pytest.raises(UsageError, match=r"row-1 has 25 tokens.*give --max-new-tokens 999 or less"):
        check_lengths(prompts, max_new_tokens=1000, context_length=1024)
    for num_tokens in (1023, 1024):
        with pytest.raises(UsageError, match="shorten it"):
            check_lengths([encoded("row-0", num_tokens)], max_new_tokens=1, context_length=1024)
