"""A vLLM that starts without its tokenizer and is given it once it runs."""

import gc
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.vllm import engine as vllm_engine
from mismatch_probe.engines.vllm import launch
from mismatch_probe.engines.vllm.declared import tokenizer_defaults
from mismatch_probe.engines.vllm.effective import give_tokenizer
from mismatch_probe.engines.vllm.launch import frozen_heap
from mismatch_probe.errors import EngineError
from mismatch_probe.records.sequences import SampledSequence, TokenSequence
from tests.engines.conftest import StartEngine, requests, same
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

LONG = SamplingSettings(max_new_tokens=150)
END = 258
TEXT, WHOLE = object(), object()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer alone knows the end of a sequence."""
    folder = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").write_text("{}")
    return folder


def sample(start: StartEngine, checkpoint: Path) -> tuple[list[SampledSequence], dict[str, Any]]:
    engine = start(checkpoint)
    return engine.sample(requests(24), LONG), engine.effective_settings()


def ends(samples: list[SampledSequence]) -> int:
    return sum(one.finish_reason == "stop" and one.sequence.token_ids[-1] == END for one in samples)


@pytest.mark.slow
def test_a_late_tokenizer_ends_responses_and_gives_texts_as_an_early_one_does(
    start: StartEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, late_settings = sample(start, checkpoint)
    assert late_settings["chosen_by_probe"] == {"enforce_eager": True, "skip_tokenizer_init": True}
    with monkeypatch.context() as early_start:
        early_start.setattr(launch, "tokenizer_defaults", lambda *_, **__: {})
        early, early_settings = sample(start, checkpoint)
    assert early_settings["chosen_by_probe"] == {"enforce_eager": True}
    assert ends(early) > 0
    assert same(late, early)
    assert [one.token_texts for one in late] == [one.token_texts for one in early]
    assert [one.finish_reason for one in late] == [one.finish_reason for one in early]
    assert late_settings["end_of_sequence_ids"] == early_settings["end_of_sequence_ids"] == [END]


@pytest.mark.slow
def test_a_tokenizer_that_is_not_given_is_seen_in_ends_and_texts(
    start: StartEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "give_tokenizer", lambda llm: None)
    samples, settings = sample(start, checkpoint)
    assert ends(samples) == 0
    assert settings["end_of_sequence_ids"] == []
    assert samples[0].token_texts is not None
    assert all(text.startswith("<id ") for text in samples[0].token_texts)


@pytest.mark.slow
def test_an_id_that_nothing_knows_is_refused_by_a_late_tokenizer_too(start: StartEngine, checkpoint: Path) -> None:
    engine = start(checkpoint)
    with pytest.raises(EngineError, match="out of vocabulary"):
        engine.replay([TokenSequence("r", [1, 2], [3, 100_000])])


class Lines(logging.Handler):
    """What a log is told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.slow
def test_the_log_of_a_start_has_no_traceback_of_a_chat_on_trial(
    start: StartEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, lines = logging.getLogger("vllm.renderers.base"), Lines()
    log.addHandler(lines)
    try:
        start(checkpoint)
        log.warning("another line")
        assert lines.texts == ["another line"]
        monkeypatch.setattr(vllm_engine, "without_trial_of_chat", nullcontext)
        start(checkpoint)
        assert lines.texts[1:] == ["Chat template warmup failed"]
    finally:
        log.removeHandler(lines)


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_start(start: StartEngine, tmp_path: Path) -> None:
    """What the process froze stays frozen, or the next engine's start and end would look at all of it."""
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError):
        start(folder)
    assert gc.get_freeze_count() > 0


@pytest.mark.slow
def test_an_argument_of_the_tokenizer_leaves_it_to_the_start(start: StartEngine, checkpoint: Path) -> None:
    settings = start(checkpoint, args={"tokenizer": str(checkpoint)}).effective_settings()
    assert settings["chosen_by_probe"] == {"enforce_eager": True}
    assert settings["end_of_sequence_ids"] == [END]


@pytest.mark.parametrize(
    ("config", "args", "has_adapter", "is_late"),
    [
        (TEXT, {"max_num_seqs": 8, "enforce_eager": True}, False, True),
        (TEXT, {}, True, False),
        (WHOLE, {}, False, False),
        (TEXT, {"tokenizer_mode": "slow"}, False, False),
        (TEXT, {"reasoning_parser": "qwen3"}, False, False),
        (TEXT, {"structured_outputs_config": {}}, False, False),
        (TEXT, {"speculative_config": {}}, False, False),
        (TEXT, {"logits_processors": ["a.b"]}, False, False),
    ],
)
def test_what_may_read_text_from_the_start_on_starts_with_the_tokenizer(
    config: object, args: dict[str, Any], has_adapter: bool, is_late: bool
) -> None:
    chosen = tokenizer_defaults(config, TEXT, args, has_adapter=has_adapter)
    assert chosen == ({"skip_tokenizer_init": True} if is_late else {})


@pytest.mark.slow
def test_an_engine_that_does_not_take_its_tokenizer_is_an_error_and_is_ended(
    start: StartEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: Any = start(checkpoint).llm  # type: ignore[attr-defined]
    give_tokenizer(llm)
    core, ended = llm.llm_engine.engine_core, []
    shutdown = core.shutdown
    monkeypatch.setattr(core, "shutdown", lambda: ended.append(shutdown()))
    monkeypatch.setattr(type(llm.renderer), "get_eos_token_id", lambda self: None)
    with frozen_heap()(), pytest.raises(EngineError, match="did not take its tokenizer"):
        give_tokenizer(llm)
    assert len(ended) == 1
