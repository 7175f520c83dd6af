"""Images in prompts: how they are read, counted and shown, and what is refused before anything is sampled."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mismatch_probe.compare.preparation import prepare
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import (
    EngineSettings,
    ExpertSettings,
    ModelSettings,
    PromptSettings,
    TrainingPathSettings,
)
from mismatch_probe.engines.start import require_images
from mismatch_probe.engines.vllm.launch import ImageInputs
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.images import read_image
from mismatch_probe.provenance.checkpoint import placeholder_ids, read_config
from mismatch_probe.tasks import Prompt, encode_prompts, load_prompts, load_tokenizer
from tests.command_line import probe
from tests.environment import environment_as_it_was
from tests.tiny_models import make_seeing_checkpoint

WriteRow = Callable[..., Path]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenCV sets LD_LIBRARY_PATH as it is imported: with another one servers of jobs are made anew, here and after."""
    with environment_as_it_was():
        return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def write(tmp_path: Path) -> WriteRow:
    """A prompt file of one row, whose content has the given parts, beside `red.png`."""
    Image.new("RGB", (28, 28), "red").save(tmp_path / "red.png")

    def write_row(*parts: dict[str, Any], **columns: Any) -> Path:
        content = [{"type": "text", "text": "Look: "}, *parts]
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps({"messages": [{"role": "user", "content": content}], **columns}) + "\n")
        return path

    return write_row


def read(path: Path) -> Prompt:
    (prompt,) = load_prompts(PromptSettings(source=str(path)), takes_images=True)
    return prompt


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "red.png"},
        {"type": "image", "url": "red.png"},
        {"type": "image", "path": "./red.png"},
        {"type": "image_url", "image_url": {"url": "red.png"}},
        {"type": "input_image", "image_url": "red.png"},
    ],
)
def test_a_path_begins_at_the_prompt_file_whatever_its_key_is(write: WriteRow, part: dict[str, Any]) -> None:
    path = write(part)
    prompt = read(path)
    assert [Path(name).resolve() for name in prompt.images] == [path.parent / "red.png"]
    assert prompt.messages is not None
    assert prompt.messages[0]["content"][1] == {"type": "image"}


def test_parts_without_a_path_take_those_of_the_column(write: WriteRow) -> None:
    path = write({"type": "image"}, images=["red.png"])
    assert read(path).images == [str(path.parent / "red.png")]
    with pytest.raises(UsageError, match=r"names 2 images and its messages have 1 parts"):
        read(write({"type": "image"}, images=["red.png", "red.png"]))
    with pytest.raises(UsageError, match=r"read from a file, and its part names none"):
        read(write({"type": "image"}))


@pytest.mark.parametrize("place", ["https://example.org/red.png", "data:image/png;base64,AAAA", ["red.png"], 3])
def test_what_is_no_path_is_refused(write: WriteRow, place: Any) -> None:
    with pytest.raises(UsageError, match=r"line 1 of .*an image is read from a file"):
        read(write({"type": "image", "image": place}))


def test_a_missing_file_and_another_kind_of_part_are_refused(write: WriteRow) -> None:
    with pytest.raises(UsageError, match=r"the image blue\.png cannot be read \(it does not exist\)"):
        read(write({"type": "image", "image": "blue.png"}))
    with pytest.raises(UsageError, match=r"holds a part of the type video, and images alone are compared"):
        read(write({"type": "video", "video": "red.png"}))


def test_commands_that_take_text_alone_refuse_images(write: WriteRow) -> None:
    path = write({"type": "image", "image": "red.png"})
    with pytest.raises(UsageError, match=r"row-0 .* holds an image, and compare alone takes images"):
        load_prompts(PromptSettings(source=str(path)))


def encode(seeing: Path, path: Path) -> Any:
    (prompt,) = encode_prompts([read(path)], load_tokenizer(seeing), "auto", 320, 2048, seeing)
    return prompt


def test_placeholders_are_counted_in_the_ids_and_shown_as_one_word(seeing: Path, write: WriteRow) -> None:
    prompt = encode(seeing, write({"type": "image", "image": "red.png"}, {"type": "text", "text": " now"}))
    assert prompt.text == "Look: [image] now>"
    assert (prompt.images.num_tokens, prompt.images.num_prompt) == (4, len(prompt.token_ids))
    assert prompt.token_ids.count(259) == 4
    assert prompt.images.engine_token_ids.count(259) == 1


@pytest.mark.parametrize("num_other", [0, 1])
def test_an_engine_that_makes_another_number_of_placeholders_is_refused(
    num_other: int, seeing: Path, write: WriteRow
) -> None:
    """A renderer that answers as one with another splitting of images does; with as many it is taken."""
    prompt = encode(seeing, write({"type": "image", "image": "red.png"}))
    [placeholder] = placeholder_ids(read_config(seeing))
    ids = [*prompt.token_ids, *[placeholder] * num_other]
    renderer = SimpleNamespace(render_cmpl=lambda requests, skip_mm_cache: [{"prompt_token_ids": ids}])
    inputs = ImageInputs(SimpleNamespace(renderer=renderer))
    if num_other:
        with pytest.raises(UsageError, match="the two sides would see other prompts"):
            inputs.of_ids(prompt.token_ids, prompt.images)
    else:
        assert inputs.of_ids(prompt.token_ids, prompt.images)["prompt_token_ids"] == prompt.token_ids


def test_pixels_have_a_digest_of_their_own(seeing: Path, write: WriteRow) -> None:
    path = write({"type": "image", "image": "red.png"})
    first = encode(seeing, path).images
    Image.new("RGB", (28, 28), "red").save(path.parent / "red.png", compress_level=0)
    other_file = encode(seeing, path).images
    assert (first.digests == other_file.digests, first.pixels == other_file.pixels) == (False, True)
    Image.new("RGB", (28, 28), "blue").save(path.parent / "red.png")
    assert encode(seeing, path).images.pixels != first.pixels


def test_a_text_that_holds_the_marker_itself_is_refused(seeing: Path, write: WriteRow) -> None:
    path = write({"type": "image", "image": "red.png"}, {"type": "text", "text": "<image>"})
    with pytest.raises(UsageError, match=r"holds 1 images, and its text has the marker <image> 2 times"):
        encode(seeing, path)


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"no picture at all", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_a_broken_image_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"the prompt holds the image .*broken\.png, which cannot be read") as raised:
        read_image(path, "the prompt")
    assert "\n" not in str(raised.value)


def test_a_cut_image_and_one_far_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cut.png"
    Image.effect_noise((64, 64), 50).save(path)
    read_image(path, "the prompt")
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(UsageError, match="cannot be read"):
        read_image(path, "the prompt")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("L", (20, 6)).save(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_image(path, "the prompt")


def test_a_template_may_lie_with_the_processor_alone(seeing: Path, write: WriteRow, tmp_path: Path) -> None:
    older = copytree(seeing, tmp_path / "older")
    template = (older / "chat_template.jinja").read_text()
    (older / "chat_template.jinja").unlink()
    (older / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(older).chat_template is None
    assert encode(older, write({"type": "image", "image": "red.png"})).text == "Look: [image]>"


def test_a_checkpoint_without_a_processor_is_refused(seeing: Path, write: WriteRow, tmp_path: Path) -> None:
    blind = copytree(seeing, tmp_path / "blind")
    (blind / "processor_config.json").unlink()
    with pytest.raises(UsageError, match=r"the processor of .*blind cannot be loaded"):
        encode(blind, write({"type": "image", "image": "red.png"}))


def test_servers_ranks_and_experts_take_text_alone(seeing: Path, write: WriteRow) -> None:
    path = write({"type": "image", "image": "red.png"})
    with pytest.raises(UsageError, match=r"the prompt holds an image, and the engine server takes none"):
        require_images(EngineSettings(name="server", args={"url": "http://127.0.0.1:9"}), "the prompt")
    require_images(EngineSettings(), "the prompt")
    settings = CompareSettings(
        model=ModelSettings(path=str(seeing)), pairs=(("fp32", "fp32"),), prompts=PromptSettings(source=str(path))
    )
    for changes, message in (
        ({"training": TrainingPathSettings(ranks=2, device="cpu")}, "ranks take prompts of text alone"),
        ({"experts": ExpertSettings(num_sequences=2)}, "experts are read in prompts of text alone"),
    ):
        with pytest.raises(UsageError, match=f"holds an image, and {message}"):
            prepare(settings.model_copy(update=changes))


@pytest.mark.slow
def test_nothing_is_sampled_where_the_checkpoint_takes_text_alone(write: WriteRow, llama: Path, tmp_path: Path) -> None:
    prompts = write({"type": "image", "image": "red.png"})
    words = ("compare", "--prompts", prompts, "--out", tmp_path / "run", "--model", llama)
    answer = probe(*words, code=ExitCode.USAGE)
    assert "is a llama model, which takes text alone" in answer.stderr
    assert not (tmp_path / "run").exists()
