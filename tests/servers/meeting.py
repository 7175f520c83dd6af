"""A process of torchrun's meets a server that takes every request: what it is told, and how soon.

python -m tests.servers.meeting STATUS SECONDS [WORKER]: the status that /init_weight_transfer_engine is answered with,
the limit, and whether a worker comes to the meeting.
"""

import json
import os
import sys
import time

from mismatch_probe.engines.server.arguments import ServerArguments
from mismatch_probe.engines.server.connection import Connection
from mismatch_probe.engines.server.transfer import WeightTransfer
from mismatch_probe.engines.vllm.serving import AbandonableThread
from mismatch_probe.errors import EngineError
from tests.servers.proxy import Json, Proxy, Reply


class SaysYes(Proxy):
    """Takes every request itself, but for the meeting.

    It holds the worker's group until the end: the last reference would have it leave while the other side connects.
    """

    def __init__(self, status: int, *, has_worker: bool) -> None:
        super().__init__("http://127.0.0.1:9")
        self._status = status
        self._has_worker = has_worker
        self._groups: list[object] = []

    def reply_to(self, method: str, path: str, headers: dict[str, str], body: Json) -> Reply:
        if path.startswith("/init") and self._has_worker:
            from mismatch_probe.engines.vllm.serving import GlooInitInfo, join_group

            joining = AbandonableThread(lambda: join_group(GlooInitInfo(**body["init_info"]), rank=1))
            self._groups.append(joining.result(10))
        return Reply.of({"world_size": 1}, self._status if path.startswith("/init") else 200)


def main(status: int, limit_seconds: float, *, has_worker: bool) -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    outcome = "they met"
    with SaysYes(status, has_worker=has_worker) as server:
        connection = Connection(ServerArguments(url=server.url))
        begun = time.monotonic()
        try:
            WeightTransfer(connection, "gloo", limit_seconds)
        except EngineError as error:
            outcome = str(error)
        print(json.dumps({"told": outcome, "seconds": time.monotonic() - begun}))
        connection.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), has_worker=len(sys.argv) > 3)
