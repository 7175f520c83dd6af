"""`docs/servers.md` names the settings of a server, and says which of them stand in `args`."""

import re
from pathlib import Path

from mismatch_probe.config.sides import InferSide
from mismatch_probe.engines.server.arguments import known_arguments
from mismatch_probe.engines.server.protocols import PROTOCOLS

TEXT = (Path(__file__).parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")


def test_every_setting_has_its_row() -> None:
    table = TEXT.split("| setting | |")[1].split("\n\n")[0]
    firsts = [row.split("|")[1] for row in table.strip().splitlines()]
    rows = {name for first in firsts for name in re.findall(r"`(\w+)`", first)}
    assert rows == {*known_arguments(), *InferSide.model_fields} - {"name", "args", "logged"}


def test_every_protocol_is_named() -> None:
    [row] = re.findall(r"^\| `protocol` \| (.+) \|$", TEXT, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(PROTOCOLS.built_in)


def test_what_stands_in_args_is_what_args_takes() -> None:
    sentence = TEXT.split("In a file:")[1].split("\n\n")[0].split("; but ")[1].split(" stand in its `args`")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(known_arguments())
