"""Cases that need the checkpoint: places and weights by `explain`, a server's tokens by `audit`."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.planted_logs import clean as sound
from benchmarks.planted_logs import logs
from benchmarks.planted_logs.base import Log, Response, some
from benchmarks.planted_logs.judging import Answer, Named, Planted, accusations, ask
from benchmarks.planted_logs.logs import Plant, Pools, Random
from benchmarks.planted_logs.pools import DEMO, loaded, other_weights, prompts_of_sums, scored
from benchmarks.planted_logs.writing import plain

# 3, with the checkpoint


def with_demo(name: str) -> Plant:
    """The fault of a log of the demo checkpoint, explained with it."""
    plant = {"period": logs.period, "onset": logs.onset}[name]

    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        few = some(random, pools["short"], 24)
        made = plant(random, {"demo": few, "smollm2": few}, folder, level)
        return Planted(made.source, made.judge, ["--model", "demo"], made.words)

    return planted


# 8, with the checkpoints of both steps

MOVES = (0.02, 0.06, 0.2)
"""Noise of the newer weights, in sizes of each matrix, at each strength."""


@torch.inference_mode()
def in_flight(old: Any, new: Any, prompt: list[int], at: int, tokens: int, end: int) -> Response:
    """A response whose first `at` tokens the old weights sample; the new ones go on behind a context of their own."""
    ids: list[int] = []
    mu: list[float] = []
    past, inputs = None, torch.tensor([prompt])
    for place in range(tokens):
        if place == at:
            past, inputs = None, torch.tensor([prompt + ids])
        answer = (old if place < at else new)(inputs, past_key_values=past, use_cache=True)
        past = answer.past_key_values
        log_probs = torch.log_softmax(answer.logits[0, -1].float(), -1)
        ids.append(int(torch.multinomial(log_probs.exp(), 1)))
        mu.append(float(log_probs[ids[-1]]))
        inputs = torch.tensor([[ids[-1]]])
        if ids[-1] == end and place >= at + 10:
            break
    return Response(prompt, ids, np.array(mu), scored(new, prompt, ids))


def weights_within(scratch: Path) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        seed = int(random.integers(1000))
        torch.manual_seed(seed)
        new_folder = other_weights(scratch / f"moved-{MOVES[level]}-{seed % 3}", MOVES[level], seed % 3)
        old, new = loaded(DEMO), loaded(new_folder)
        end = old.config.eos_token_id
        prompts = prompts_of_sums(12, int(random.integers(5, 9)), seed)
        changes = [int(random.integers(12, 44)) if random.random() < 0.7 else 0 for _ in prompts]
        log = [in_flight(old, new, prompt, at, 64, end) for prompt, at in zip(prompts, changes, strict=True)]
        log = [entry.with_extra(weight_version="8") for entry in log]
        source = plain(folder, log)

        def run() -> Named:
            ask(folder / "run", "import", source, "--out", folder / "run")
            answer = ask(
                folder / "run", "explain", folder / "run", "--model", new_folder,
                "--weights", f"7={DEMO}", "--weights", f"8={new_folder}",
            )  # fmt: skip
            return judged_parts(answer, changes)

        words = f"moved {MOVES[level]}, {sum(map(bool, changes))} of {len(changes)} responses change"
        return Planted(source, lambda _: Named(False), words=words, run=run)

    return planted


def judged_parts(answer: Answer, changes: list[int]) -> Named:
    """The cause, the number of responses that change, and the brackets of nine in ten of the changes that are shown."""
    parts = answer.document.get("parts") or {}
    code = answer.verdict["code"]
    shown = [entry for entry in parts.get("responses", []) if len(entry["parts"]) > 1]
    right = wrong = 0
    for entry in shown:
        planted = changes[int(re.findall(r"line (\d+)", entry["where"])[0]) - 1]
        low, high = entry["intervals"][0]
        right, wrong = right + (low - 2 <= planted <= high + 2), wrong + (not low - 2 <= planted <= high + 2)
    mixed = parts.get("num_mixed", 0)
    named = code == "mixed_weights" or "mixed_weights" in json.dumps(answer.document.get("sides", [])[:1])
    place = bool(shown) and right >= 0.9 * (right + wrong)
    share = abs(mixed - sum(map(bool, changes))) <= 2
    misfits = parts.get("misfits", {})
    words = f"{code}, {mixed} mixed, {right} of {right + wrong} places, {misfits}, {answer.verdict['sentence'][:200]}"
    return Named(named and share, place, "completion" in misfits, words)


# 7: a server that gives tokens alone


class Served:
    """A model behind `/v1/completions`, as a provider has it: in BF16, decoded with a key-value cache."""

    def __init__(self, model: Any, temperature: float | None) -> None:
        self.model, self.temperature, self.lock = model, temperature, threading.Lock()
        self.end = model.config.eos_token_id

    @torch.inference_mode()
    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        temperature = request.get("temperature", 1.0) if self.temperature is None else self.temperature
        prompts = request["prompt"]
        prompts = prompts if isinstance(prompts[0], list) else [prompts]
        choices = []
        with self.lock:
            for index, prompt in enumerate(prompts * int(request.get("n") or 1)):
                noise = torch.Generator().manual_seed(int(request.get("seed") or 0) + index)
                ids, reason = self.decoded(prompt, request.get("max_tokens", 16), temperature, noise)
                choices.append(
                    {"index": index, "text": "", "token_ids": ids, "prompt_token_ids": prompt, "logprobs": None,
                     "finish_reason": reason, "stop_reason": None}
                )  # fmt: skip
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "policy", "choices": choices,
                "usage": usage}  # fmt: skip

    def decoded(
        self, prompt: list[int], tokens: int, temperature: float, noise: torch.Generator
    ) -> tuple[list[int], str]:
        ids: list[int] = []
        past, inputs = None, torch.tensor([prompt])
        for _ in range(tokens):
            answer = self.model(inputs, past_key_values=past, use_cache=True)
            past, logits = answer.past_key_values, answer.logits[0, -1].float()
            if temperature:
                ids.append(int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=noise)))
            else:
                ids.append(int(logits.argmax()))
            if ids[-1] == self.end:
                return ids, "stop"
            inputs = torch.tensor([[ids[-1]]])
        return ids, "length"


@contextlib.contextmanager
def serving(served: Served) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def reply(self, document: dict[str, Any], code: int = 200) -> None:
            body = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path.rstrip("/").endswith("/v1/models"):
                card = {"id": "policy", "object": "model", "created": 0, "owned_by": "provider"}
                self.reply({"object": "list", "data": [card]})
            else:
                self.reply({"error": {"message": "not found"}}, 404)

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("/v1/completions"):
                self.reply(served.answer(request))
            else:
                self.reply({"error": {"message": "not found"}}, 404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def rounded(model: Any, kind: str) -> Any:
    """The matrices of a model rounded to a format: FP8 (E4M3), or integers with a scale for each row or 32 of it. The
    head keeps its format, as servers leave it.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            weight = module.weight.data.float()
            if kind == "fp8":
                scale = weight.abs().max() / 448
                new = (weight / scale).to(torch.float8_e4m3fn).float() * scale
            else:
                parts = weight.reshape(len(weight), -1, 32) if kind == "int4, groups" else weight[:, None]
                scale = parts.abs().amax(-1, keepdim=True) / 7
                new = ((parts / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)
            module.weight.data = new.to(module.weight.dtype)
    return model


def audited(served: Served, folder: Path, arguments: list[str]) -> Answer:
    prompts = folder / "prompts.jsonl"
    random = np.random.default_rng(int(arguments[-1]))
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789 =:?+"]  # no sums, of which the model is sure
    texts = ["".join(random.choice(letters, 24)) for _ in range(16)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    with serving(served) as url:
        return ask(folder / "run", "audit", "--model", "demo", "--server", url, "--prompts", prompts,
                   "--max-new-tokens", "64", *arguments)  # fmt: skip


TEMPERATURES = (0.9, 0.75, 0.5)
WEIGHTS = (0.03, 0.08, 0.25)
FORMATS = ("fp8", "int4, groups", "int4, rows")


def server(kind: str, scratch: Path) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        seed = int(random.integers(10_000))
        words = {"temperature": TEMPERATURES, "weights": WEIGHTS, "quantisation": FORMATS}[kind][level]
        temperature = None
        if kind == "temperature":
            temperature = TEMPERATURES[level] if random.random() < 0.5 else 1 / TEMPERATURES[level]
            model = loaded(DEMO)
            words = temperature
        elif kind == "weights":
            model = loaded(other_weights(scratch / f"moved-{WEIGHTS[level]}-{seed % 3}", WEIGHTS[level], seed % 3))
        else:
            model = rounded(loaded(DEMO), FORMATS[level])
        drawn = ["--temperature", "1", "--samples-per-prompt", "4"] if kind == "temperature" else []

        def run() -> Named:
            answer = audited(Served(model, temperature), folder, [*drawn, "--seed", str(seed)])
            verdict = answer.document.get("verdict", {})
            text = json.dumps(verdict)
            cause = answer.exit_code == 1
            place = None
            if temperature is not None:
                law = answer.document.get("law") or {}
                place = "temperature" in text and abs(law.get("temperature", 9.0) / temperature - 1) < 0.1
            elif kind == "quantisation":
                place = ("fp8" if level == 0 else "int4") in verdict.get("sentence", "").lower()
            else:
                place = "weights" in text
            return Named(
                cause, place, None, f"{answer.exit_code}, {text[:400]} {answer.text[-150:] if not verdict else ''}"
            )

        return Planted(folder, lambda _: Named(False), words=str(words), run=run)

    return planted


def sound_server(arguments: list[str]) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        seed = str(int(random.integers(10_000)))

        def run() -> Named:
            answer = audited(Served(loaded(DEMO), None), folder, [*arguments, "--seed", seed])
            verdict = answer.document.get("verdict", {})
            return Named(answer.exit_code in (0, 3), None, None, f"{answer.exit_code}, {json.dumps(verdict)[:300]}")

        return Planted(folder, lambda _: Named(False), words=" ".join(arguments) or "greedy", run=run)

    return planted


# Sound logs, with the checkpoint


def sound_log(draw: Callable[[Random, Pools], Log], model: str) -> Plant:
    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        log = some(random, draw(random, pools), int(random.integers(12, 30)))

        def judge(answer: Answer) -> Named:
            accused = accusations(answer)
            kind = answer.verdict["kind"]
            right = kind in ("precision", "clean")
            return Named(
                not accused and kind != "bug",
                None,
                None,
                "; ".join(accused)[:300] or f"{kind} {'' if right else answer.words[:300]}",
            )

        return Planted(plain(folder, log), judge, ["--model", model], f"{len(log)} responses")

    return planted


def sound_within(scratch: Path) -> Plant:
    """No response changes: the log is of the newer weights alone."""

    def planted(random: Random, pools: Pools, folder: Path, level: int) -> Planted:
        moved = other_weights(scratch / "moved-0.06-0", 0.06, 0)
        log = [entry.with_extra(weight_version="8") for entry in some(random, pools["short"], 14)]
        source = plain(folder, log)

        def run() -> Named:
            ask(folder / "run", "import", source, "--out", folder / "run")
            answer = ask(folder / "run", "explain", folder / "run", "--model", "demo", "--weights", f"7={moved}")
            parts = answer.document.get("parts") or {}
            fine = answer.verdict["kind"] != "bug" and not parts.get("num_mixed") and not parts.get("num_misfits")
            return Named(fine, None, None, f"{answer.verdict['code']}, {parts}"[:300])

        return Planted(source, lambda _: Named(False), words="14 responses", run=run)

    return planted


def faults(scratch: Path) -> dict[tuple[int, str], Plant]:
    return {
        (3, "period, checkpoint"): with_demo("period"),
        (3, "step at a place, checkpoint"): with_demo("onset"),
        **{(7, f"server, other {kind}"): server(kind, scratch) for kind in ("temperature", "weights", "quantisation")},
        (8, "weights that change, checkpoints"): weights_within(scratch),
    }  # fmt: skip


def clean_logs(scratch: Path) -> dict[tuple[int, str], Plant]:
    def of_demo(random: Random, pools: Pools) -> Log:
        return pools["short"]

    return {
        (0, "as it is, checkpoint"): sound_log(of_demo, "demo"),
        (0, "kept sets, checkpoint"): sound_log(sound.kept_sets, "demo"),
        (0, "greedy, checkpoint"): sound_log(sound.greedy, "demo"),
        (0, "experts, checkpoint"): sound_log(lambda _, pools: pools["mixture"], str(scratch / "moe")),
        (0, "one set of weights, checkpoints"): sound_within(scratch),
        (0, "sound server, greedy"): sound_server([]),
        (0, "sound server, sampled"): sound_server(["--temperature", "1", "--samples-per-prompt", "4"]),
    }
