"""Headers that come from the checkpoint's own chat template."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

from mismatch_probe.explain import explain
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.tasks import load_tokenizer
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


def test_a_system_prompt_on_one_side_is_found_in_the_template(
    llama: Path, responses: list[TokenSequence], tmp_path: Path
) -> None:
    model = with_template(llama, tmp_path / "templated", TEMPLATE)
    text = "<s>system: You are a helpful assistant.</s>"
    header = load_tokenizer(model)(text, add_special_tokens=False)["input_ids"]
    longer = [
        replace(one, prompt_token_ids=[*one.prompt_token_ids[:1], *header, *one.prompt_token_ids[1:]])
        for one in responses
    ]
    (side,) = explain(settings(model), logged(responses, mu=scored(model, longer))).sides
    assert side.verdict.code == "prompt_prefix"
    assert f"an extra header of {len(header)} tokens" in side.verdict.sentence


def test_a_template_that_refuses_a_system_prompt_is_said_so(
    llama: Path, responses: list[TokenSequence], tmp_path: Path
) -> None:
    model = with_template(llama, tmp_path / "refusing", REFUSING)
    (side,) = explain(settings(model), logged(responses, mu=scored(model, responses))).sides
    assert side.verdict.code == "as_declared"
    assert "no system prompts" in side.left_out["a header of the chat template"]
