"""A real `vllm serve` of the demo checkpoint, on this machine's CPU: eager and small."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

from mismatch_probe.config.model import ModelSettings
from mismatch_probe.tasks import resolve_model
from tests.forks import THIS_MACHINE
from tests.ports import free_port
from tests.warm_python import WarmProcess, warm_process

CONTEXT: Final = 2048
TAKES_WEIGHTS: Final = (
    *("--worker-extension-cls", "mismatch_probe.engines.vllm.serving.ServedWorker"),
    *("--weight-transfer-config", '{"backend": "gloo"}'),
)
"""As docs/servers.md has it."""
SEQUENCES: Final = 16
"""At once, each prefilled whole: a CPU's server ends at a seeded request whose prefill is cut in two."""
_CACHE_BYTES: Final = 2**27
"""Twice of what that many sequences fill."""
_START_SECONDS: Final = 300.0


def demo_checkpoint() -> Path:
    return resolve_model(ModelSettings(path="demo"))


class RealServer:
    """Started on entering, with these words behind the common ones; it can be killed and started again."""

    def __init__(self, log: Path, *words: str, checkpoint: Path | None = None) -> None:
        self.port = free_port()
        self.log = log
        self._words = words
        self._checkpoint = checkpoint or demo_checkpoint()
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        with ExitStack() as ended_with_a_failure:
            ended_with_a_failure.callback(self.kill)
            self.start()
            ended_with_a_failure.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        words = [
            *("vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--model", str(self._checkpoint), "--served-model-name", "demo"),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(CONTEXT)),
            *("--max-num-seqs", str(SEQUENCES), "--max-num-batched-tokens", str(SEQUENCES * CONTEXT)),
            *("--kv-cache-memory-bytes", str(_CACHE_BYTES)),
        ]
        own = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine computes in one process: a second one would spin
        }
        self._process = self._begun([*words, *self._words], own)
        self._wait_until_it_answers()

    def _begun(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | WarmProcess:
        """The module and its words as a process in a session of its own."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        """With everything that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def load(self, checkpoint: Path) -> None:
        """Other weights in the running engine, as a trainer pushes them, and no label."""
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})
        self._post("/collective_rpc", {"method": "probe_repack"})
        self._post("/reset_prefix_cache", {})

    def begin_update(self) -> None:
        """What a trainer leaves that is killed while it sends weights."""
        self._post("/start_weight_update", {})

    def label(self, version: str) -> None:
        self._post("/update_weight_version", {"new_version": version})

    def _post(self, path: str, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", body, headers), timeout=120) as answer:
            assert answer.status == 200

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            assert self._process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.log.read_text(errors='replace')[-3000:]}")


class WarmServer(RealServer):
    """Forked from a process that has imported vLLM."""

    def _begun(self, words: list[str], environment: dict[str, str]) -> WarmProcess:
        self._stack = ExitStack()
        environment |= {THIS_MACHINE: str(self.log.parents[1] / "machine.json")}
        started = warm_process(*words, folder=Path.cwd(), errors=self.log, environment=environment)
        return self._stack.enter_context(started)

    def kill(self) -> None:
        super().kill()
        self._stack.close()
