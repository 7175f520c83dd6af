"""The sums of the reference's walk: what is written is read."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.records.activations import ErrorSums, OwnSums, PlaceSums, RouterSums, SideSums
from mismatch_probe.records.tables import read_sums, write_sums


def errors(start: float) -> ErrorSums:
    return ErrorSums(*(np.arange(3.0) + start + 10 * field for field in range(6)))


def side(start: float) -> SideSums:
    by_number = OwnSums(*(np.arange(5.0) + start + 20 * field for field in range(12)))
    return SideSums(errors(start), errors(start + 100), by_number, replace(by_number, squares=by_number.squares / 2))


PLACES = [PlaceSums(layer, f"block {layer}", side(1.0), side(2.0), errors(3.0)) for layer in (None, *range(11))]
ROUTERS = [RouterSums(4, *(np.arange(3.0) + start for start in range(4)))]


@pytest.mark.slow
@pytest.mark.parametrize(("places", "routers"), [(PLACES, ROUTERS), (PLACES, []), ([], ROUTERS), ([], [])])
def test_sums_come_back_as_they_were(places: list[PlaceSums], routers: list[RouterSums], tmp_path: Path) -> None:
    write_sums(tmp_path / "sums.npz", places, routers)
    for there, back in zip((places, routers), read_sums(tmp_path / "sums.npz"), strict=True):
        np.testing.assert_equal([asdict(record) for record in back], [asdict(record) for record in there])


def test_sums_of_before_extra_roundings_were_summed_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sums.npz"
    write_sums(path, PLACES[:1], [])
    with np.load(path) as arrays:
        np.savez(path, **{name: arrays[name] for name in arrays.files if ".extra_" not in name})
    ((place,), _) = read_sums(path)
    assert place.infer.own_by_number.extra_along.tolist() == [0.0]
    assert place.infer.own_by_number.squares.tolist() == PLACES[0].infer.own_by_number.squares.tolist()
