"""Makes the pictures of the documents from real pages.

    python scripts/pictures.py [--real RUN] [--demo RUN] [--training RUN]

--real: the run of `make real`. --demo: that of `make demo`, with the answer of `localize --run` filed in it.
--training: a run of `train`. Only the pictures of the given runs are made: of their `report.html`, with plotly.js in
it, in docs/pictures. The titles and readings that each shows are written to scripts/pictures.json, which a test
compares with the code. Chromium must be installed.
"""

import argparse
import ast
import base64
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.report.browser import Tab, browser_tab  # noqa: E402

_WIDTH, _QUALITY = 1180, 82
_MARGIN, _FOOT = 24, 6
_PLACE = """(() => {{
    const part = document.querySelector({part!r});
    const top = (part.matches("section") ? part.querySelector("h2") : part).getBoundingClientRect().top;
    const boxes = (names) => [...part.querySelectorAll(names)].map((each) => each.getBoundingClientRect());
    const shown = boxes("p, li, tr, h3, .plot, .prompt, .response").filter((box) => box.height > 0);
    const ends = boxes("p, li, tr, .plot, .response").map((box) => box.bottom).filter((end) => end <= top + {most});
    const clean = ends.filter((end) => !shown.some((box) => box.top < end + {foot} && box.bottom > end + 1));
    const box = part.getBoundingClientRect();
    return [box.left + scrollX, top + scrollY, box.width, Math.min(Math.max(...clean), box.bottom) + scrollY];
}})()"""
"""Where a part is, down to the last end of a paragraph, a row or a drawing within the height that cuts no other."""


_TEXTS = """(() => {{
    const texts = [...document.querySelector({part!r}).querySelectorAll("h2, h3, .lede, figcaption, dt, caption")];
    const shown = texts.filter((text) => text.getBoundingClientRect().bottom + scrollY <= {end});
    return shown.map((text) => text.innerText.replace("linear", "").trim());
}})()"""
_GAP = "\0"
WORDS = ROOT / "scripts" / "pictures.json"


@dataclass(frozen=True)
class Picture:
    """name: of the file. run: real, demo or training. part: selects what is shown, up to so many pixels. opened: what
    of it is folded on the page.
    """

    name: str
    run: str
    part: str
    most_height: int
    opened: str = ""


PICTURES = (
    Picture("first-screen", "real", "main", 740),
    Picture("verdict", "real", "#verdicts", 580, opened="#verdicts details"),
    Picture("scatter", "real", "#scatter", 700),
    Picture("length", "real", "#length", 1040),
    Picture("responses", "real", "#responses", 980),
    Picture("errors", "real", "#errors", 560),
    Picture("demo", "demo", "main", 740),
    Picture("localize", "demo", "#localize-bf16-bf16", 960),
    Picture("training", "training", "main", 1010),
)


def texts_of_code() -> set[str]:
    """Every text that stands in the code of pages, with a gap at each place that code fills in."""
    texts = set()
    for path in (ROOT / "mismatch_probe" / "report").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            if isinstance(node, ast.JoinedStr):
                texts.add("".join(str(part.value) if isinstance(part, ast.Constant) else _GAP for part in node.values))
    return texts


def sentences(text: str) -> list[str]:
    """As far as a full stop, a colon or a semicolon; none that begins with a mark."""
    return [part.rstrip(" .:;") for part in re.split(r"(?<=[.:;])\s+", text) if part[:1].isalnum()]


@cache
def _sentences_of_code() -> tuple[frozenset[str], re.Pattern[str]]:
    """Those without a gap, and one pattern of all that have one."""
    parts = {part for text in texts_of_code() for part in sentences(text)}
    gapped = {part for part in parts if _GAP in part and sum(map(str.isalpha, part)) > 3}
    return frozenset(parts), re.compile("|".join(re.escape(part).replace(_GAP, ".+?") for part in gapped))


def stale_sentences(texts: Iterable[str]) -> list[str]:
    """What the present code of pages says nowhere."""
    full, gapped = _sentences_of_code()
    parts = [part for text in texts for part in sentences(text)]
    return [part for part in parts if part not in full and not gapped.fullmatch(part)]


def take(tab: Tab, picture: Picture, folder: Path) -> tuple[Path, list[str]]:
    """The file, and the texts in it that stand in the code."""
    if picture.opened:
        tab.run(f"document.querySelector({picture.opened!r}).open = true")
    left, top, width, end = tab.run(_PLACE.format(part=picture.part, most=picture.most_height, foot=_FOOT))
    start = max(0, top - _MARGIN)
    clip = {"x": max(0, left - _MARGIN), "y": start, "scale": 1}
    clip |= {"width": width + 2 * _MARGIN, "height": end + _FOOT - start}
    shot = tab.call("Page.captureScreenshot", format="webp", quality=_QUALITY, captureBeyondViewport=True, clip=clip)
    path = folder / f"{picture.name}.webp"
    path.write_bytes(base64.b64decode(shot["data"]))
    texts = tab.run(_TEXTS.format(part=picture.part, end=end))
    return path, [text for text in dict.fromkeys(texts) if not stale_sentences([text])]


def main(runs: Mapping[str, Path]) -> None:
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    words = json.loads(WORDS.read_text(encoding="utf-8")) if WORDS.exists() else {}
    for name, run in runs.items():
        with browser_tab() as tab:
            tab.open(run / "report.html", _WIDTH)
            tab.draw_all()
            tab.run("document.querySelectorAll('.modebar').forEach((buttons) => (buttons.style.display = 'none'))")
            for picture in PICTURES:
                if picture.run == name:
                    path, words[picture.name] = take(tab, picture, folder)
                    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
    WORDS.write_text(json.dumps(words, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("real", "demo", "training"):
        parser.add_argument(f"--{name}", type=Path)
    given = {name: run for name, run in vars(parser.parse_args()).items() if run is not None}
    main(given) if given else parser.error("give at least one run")
