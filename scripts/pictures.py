"""Makes the pictures of the documents from real pages: python scripts/pictures.py COMPARISON TRAINING

COMPARISON: the run of `make demo`, with the answer of `localize --run` filed in it. TRAINING: a run of `train`. The
pictures are of their `report.html`, with plotly.js in it, and go to docs/pictures. Chromium must be installed.
"""

import base64
import sys
from dataclasses import dataclass
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
    const shown = boxes("p, li, tr, h3, .plot").filter((box) => box.height > 0);
    const ends = boxes("p, li, tr, .plot").map((box) => box.bottom).filter((end) => end <= top + {most});
    const clean = ends.filter((end) => !shown.some((box) => box.top < end + {foot} && box.bottom > end + 1));
    const box = part.getBoundingClientRect();
    return [box.left + scrollX, top + scrollY, box.width, Math.min(Math.max(...clean), box.bottom) + scrollY];
}})()"""
"""Where a part is, down to the last end of a paragraph, a row or a drawing within the height that cuts no other."""


@dataclass(frozen=True)
class Picture:
    """name: of the file. page: 0 or 1, which run's. part: selects what is shown, up to so many pixels; opened: what of
    it is folded on the page.
    """

    name: str
    page: int
    part: str
    most_height: int
    opened: str = ""


PICTURES = (
    Picture("first-screen", 0, "main", 740),
    Picture("verdict", 0, "#verdicts", 580, opened="#verdicts details"),
    Picture("scatter", 0, "#scatter", 700),
    Picture("length", 0, "#length", 1040),
    Picture("responses", 0, "#responses", 760),
    Picture("errors", 0, "#errors", 560),
    Picture("localize", 0, "#localize-bf16-bf16", 960),
    Picture("training", 1, "main", 1010),
)


def take(tab: Tab, picture: Picture, folder: Path) -> Path:
    if picture.opened:
        tab.run(f"document.querySelector({picture.opened!r}).open = true")
    left, top, width, end = tab.run(_PLACE.format(part=picture.part, most=picture.most_height, foot=_FOOT))
    start = max(0, top - _MARGIN)
    clip = {"x": max(0, left - _MARGIN), "y": start, "scale": 1}
    clip |= {"width": width + 2 * _MARGIN, "height": end + _FOOT - start}
    shot = tab.call("Page.captureScreenshot", format="webp", quality=_QUALITY, captureBeyondViewport=True, clip=clip)
    path = folder / f"{picture.name}.webp"
    path.write_bytes(base64.b64decode(shot["data"]))
    return path


def main(runs: list[str]) -> None:
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    for number, run in enumerate(runs):
        with browser_tab() as tab:
            tab.open(Path(run) / "report.html", _WIDTH)
            tab.draw_all()
            for picture in PICTURES:
                if picture.page == number:
                    path = take(tab, picture, folder)
                    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1:])
