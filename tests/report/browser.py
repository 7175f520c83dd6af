"""A real browser that tests can steer, through its debugging protocol."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome to open the page in")

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--remote-debugging-port=0"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--allow-file-access-from-files",
)
_PATIENCE_SECONDS = 90.0


class Tab:
    """One page in the browser; `console` collects what it printed and what it threw."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.console: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command of the protocol; raises AssertionError where the browser refuses it."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=_PATIENCE_SECONDS))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]  # type: ignore[no-any-return]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            self.console.append(message["params"]["entry"]["text"])
        if message.get("method") == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(message["params"]["args"]))

    def open(self, path: Path, width: int = 1280, height: int = 1000) -> None:
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", media="")
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, a promise's where it is one."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression holds."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never: {condition}; console: {self.console}"
            time.sleep(0.05)

    def draw_all(self) -> None:
        """Scroll through the page, its folded sections opened, until every drawing of it is there."""
        self.run("document.querySelectorAll('.whole').forEach((fold) => (fold.open = true))")
        self.run("document.querySelectorAll('.plot').forEach((plot) => plot.scrollIntoView())")
        condition = "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))"
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, f"not drawn; console: {self.console}"
            self.run("document.querySelector('.plot:not([data-drawn])')?.scrollIntoView()")
            time.sleep(0.05)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self._mouse("mouseMoved", start)
        self._mouse("mousePressed", start)
        for step in range(1, 5):
            place = tuple(first + (last - first) * step / 4 for first, last in zip(start, end, strict=True))
            self._mouse("mouseMoved", (place[0], place[1]), buttons=1)
        self._mouse("mouseReleased", end)

    def double_click(self, place: tuple[float, float]) -> None:
        for count in (1, 2):
            self._mouse("mousePressed", place, clickCount=count)
            self._mouse("mouseReleased", place, clickCount=count)

    def _mouse(self, kind: str, place: tuple[float, float], **more: Any) -> None:
        button = {"button": "left"} if kind != "mouseMoved" else {}
        self.call(
            "Input.dispatchMouseEvent",
            **({"type": kind, "x": place[0], "y": place[1], "clickCount": 1} | button | more),
        )

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        height = self.run("document.documentElement.scrollHeight")
        width = self.run("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser_tab() -> Iterator[Tab]:
    """The one page of a fresh browser."""
    with running_browser() as page, steered(page) as tab:
        yield tab


@contextmanager
def steered(page: str) -> Iterator[Tab]:
    """The page at this address; it is left empty."""
    with connect(page, max_size=None) as connection:
        tab = Tab(connection)
        yield tab
        tab.call("Page.navigate", url="about:blank")


@contextmanager
def running_browser() -> Iterator[str]:
    """The address of the one empty page of a fresh browser, which is gone with its profile at the end."""
    assert BROWSER is not None
    with TemporaryDirectory(prefix="mismatch-probe-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [BROWSER, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_address(Path(profile)), max_size=None) as connection:
                browser = Tab(connection)
                [page] = [
                    target for target in browser.call("Target.getTargets")["targetInfos"] if target["type"] == "page"
                ]
                port = connection.remote_address[1]
            yield f"ws://127.0.0.1:{port}/devtools/page/{page['targetId']}"
        finally:
            process.terminate()
            process.wait(timeout=_PATIENCE_SECONDS)


def _address(profile: Path) -> str:
    file = profile / "DevToolsActivePort"
    end = time.monotonic() + _PATIENCE_SECONDS
    while not file.exists() or len(file.read_text().split()) < 2:
        assert time.monotonic() < end, "the browser did not start"
        time.sleep(0.05)
    port, path = file.read_text().split()
    return f"ws://127.0.0.1:{port}{path}"


def shown(tab: Tab, page: str, folder: Path, width: int = 1280) -> Tab:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    tab.console.clear()
    tab.open(path, width)
    return tab
