"""Headers that come from the checkpoint's own chat template."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from mismatch_probe.config.model import ExplainSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.explain import explain
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.tasks import load_tokenizer
from tests.explain.conftest import ExplainedLog
from tests.explain.logs import logged, scored, settings

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}" + TEMPLATE


def with_template(checkpoint: Path, folder: Path, template: str) -> Path:
    copytree(checkpoint, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@pytest.mark.slow
def test_a_system_prompt_on_one_side_is_found_in_the_template(
    llama: Path, responses: list[TokenSequence], explained_log: ExplainedLog, tmp_path: Path
) -> None:
    model = with_template(llama, tmp_path / "templated", TEMPLATE)
    text = "<s>system: You are a helpful assistant.</s>"
    header = load_tokenizer(model)(text, add_special_tokens=False)["input_ids"]
    longer = [
        replace(one, prompt_token_ids=[*one.prompt_token_ids[:1], *header, *one.prompt_token_ids[1:]])
        for one in responses
    ]
    (side,) = explained_log(logged(responses, mu=scored(model, longer)), model=model).sides
    assert side.verdict.code == "prompt_prefix"
    assert f"an extra header of {len(header)} tokens" in side.verdict.sentence


@pytest.mark.slow
def test_a_template_that_refuses_a_system_prompt_is_said_so(
    llama: Path, responses: list[TokenSequence], explained_log: ExplainedLog, tmp_path: Path
) -> None:
    model = with_template(llama, tmp_path / "refusing", REFUSING)
    (side,) = explained_log(logged(responses, mu=scored(model, responses)), model=model).sides
    assert side.verdict.code == "as_declared"
    assert "no system prompts" in side.left_out["a header of the chat template"]


@pytest.mark.slow
def test_a_header_that_is_given_as_a_text_is_encoded_and_tried(
    llama: Path, responses: list[TokenSequence], explained_log: ExplainedLog
) -> None:
    text = "You are terse. "
    header = load_tokenizer(llama)(text, add_special_tokens=False)["input_ids"]
    longer = [
        replace(one, prompt_token_ids=[*one.prompt_token_ids[:1], *header, *one.prompt_token_ids[1:]])
        for one in responses
    ]
    log = logged(responses, mu=scored(llama, longer))
    (side,) = explained_log(log, header_texts=(text,)).sides
    assert side.verdict.code == "prompt_prefix"
    assert f"an extra header of {len(header)} tokens" in side.verdict.sentence


@pytest.mark.slow
def test_the_text_of_a_header_needs_a_tokenizer(llama: Path, responses: list[TokenSequence], tmp_path: Path) -> None:
    bare = copytree(llama, tmp_path / "bare", ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json"])
    log = logged(responses, mu=scored(llama, responses))
    with pytest.raises(UsageError, match="give its token ids: --header 1,2,3"):
        explain(settings(bare, header_texts=("You are terse. ",)), log)


def test_headers_pass_to_a_process_of_its_own(llama: Path) -> None:
    given = settings(llama, headers=[[40, 41], [42]], header_texts=["You are terse."])
    assert given.headers == ((40, 41), (42,))
    assert ExplainSettings.model_validate(given.model_dump(mode="json")) == given
