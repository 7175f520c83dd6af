"""From matplotlib's SVG document to a drawing that belongs to the page: its text is text, its colours are variables."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable

from mismatch_probe.inert import plain
from mismatch_probe.report.view import Heading

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT_FAMILY = re.compile(r"\s*font-family:[^;]*;?")
_LONG_FRACTION = re.compile(r"(\d+\.\d)\d+")
_GEOMETRY = ("d", "x", "y", "width", "height", "transform", "viewBox")
_SPACED_COMMAND = re.compile(r" ?([A-Za-z]) ?")
_NOT_INHERITED = ("opacity", "clip-path", "mask", "filter")
_NO_ROTATION = re.compile(r"^rotate\(-?0 ")


def for_page(document: bytes, heading: Heading, colors: dict[str, str]) -> str:
    """Inline SVG with a title and a description, without fonts, metadata, global styles or a fixed size.

    The heading's anchor begins every id, so that drawings on one page cannot collide; `colors` maps a stand-in colour
    to what replaces it.
    """
    root = ET.fromstring(document)
    _drop(root, {f"{_SVG}metadata", f"{_SVG}style"})
    _keep_referenced_ids(root, heading.anchor)
    _drop_empty(root, {f"{_SVG}g", f"{_SVG}defs"})
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.tail = None
        if element.text and not element.text.strip():
            element.text = None
        if "style" in element.attrib:
            element.set("style", _FONT_FAMILY.sub("", element.attrib["style"]))
        if _NO_ROTATION.match(element.get("transform", "")):
            del element.attrib["transform"]
        for name in _GEOMETRY:
            if name in element.attrib:
                element.set(name, _LONG_FRACTION.sub(r"\1", " ".join(element.attrib[name].split())))
        if "d" in element.attrib:
            element.set("d", _SPACED_COMMAND.sub(r"\1", element.attrib["d"]))
    _share_styles(root)
    _name(root, heading)
    text = ET.tostring(root, encoding="unicode")
    for stand_in, replacement in colors.items():
        text = text.replace(stand_in, replacement)
    return text


def _name(root: ET.Element, heading: Heading) -> None:
    words = {"title": heading.title, "desc": heading.description}
    for place, (tag, text) in enumerate(words.items()):
        element = ET.Element(tag, {"id": f"{heading.anchor}-{tag}"})
        element.text = plain(text)
        root.insert(place, element)
    root.attrib = {
        "class": "plot",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-labelledby": " ".join(f"{heading.anchor}-{tag}" for tag in words),
    }


def _drop(root: ET.Element, tags: set[str]) -> None:
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in tags]:
            parent.remove(child)


def _drop_empty(parent: ET.Element, tags: set[str]) -> None:
    for child in list(parent):
        _drop_empty(child, tags)
        if child.tag in tags and not len(child):
            parent.remove(child)


def _share_styles(root: ET.Element) -> None:
    """What all markers of a curve are styled with stands once at the group that holds them, where they inherit it."""
    for group in root.iter("g"):
        styles = {child.get("style", "") for child in group}
        if "style" in group.attrib or len(group) < 2 or len(styles) > 1:
            continue
        style = styles.pop()
        names = {declaration.split(":")[0].strip() for declaration in style.split(";")}
        if style and names.isdisjoint(_NOT_INHERITED):
            group.set("style", style)
            for child in group:
                del child.attrib["style"]


def _keep_referenced_ids(root: ET.Element, anchor: str) -> None:
    used = list(dict.fromkeys(_references(root.iter())))
    renamed = {old: f"{anchor}-{number}" for number, old in enumerate(used)}
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in renamed:
            element.set("id", renamed[old])
        if _HREF in element.attrib:
            element.set("href", f"#{renamed[element.attrib.pop(_HREF)[1:]]}")
        for name, value in element.attrib.items():
            if "url(#" in value:
                element.set(name, _REFERENCE.sub(lambda match: f"url(#{renamed[match[1]]})", value))


def _references(elements: Iterable[ET.Element]) -> Iterable[str]:
    for element in elements:
        if _HREF in element.attrib:
            yield element.attrib[_HREF][1:]
        for value in element.attrib.values():
            yield from _REFERENCE.findall(value)
