"""Rows of lists that are looked at all at once are what each of them by itself is."""

import numpy as np
import pyarrow as pa
import pytest

from mismatch_probe.compare import pair_data

ROWS = [np.array([-1.0, np.nan]), np.zeros(0), np.array([-3.0]), np.array([-9999.0, -0.5, 0.0])]


def lists(rows: pair_data.RowArrays) -> list[list[float]]:
    return [row.tolist() for row in rows]


def test_the_lists_of_a_column_are_rows_and_none_is_an_empty_one() -> None:
    column = pa.chunked_array([[[1.0, 2.0], None], [[], [3.0]]])
    assert lists(pair_data.rows_in(column)) == [[1, 2], [], [], [3]]
    assert pair_data.offsets_in(column).tolist() == [0, 2, 2, 2, 3]


def test_every_row_is_changed_and_keeps_its_length() -> None:
    assert lists(pair_data.map_rows(ROWS, np.isnan)) == lists([np.isnan(row) for row in ROWS])


def test_values_and_rows_that_a_test_holds_of_are_counted() -> None:
    assert pair_data.count_values(ROWS, np.isnan) == 1
    assert pair_data.rows_with(ROWS, lambda values: values < -2).tolist() == [False, False, True, True]


def test_a_mask_chooses_of_each_row_and_a_row_of_another_length_stays_whole() -> None:
    masks = [np.array([True, False]), np.zeros(0, bool), np.array([False]), np.array([True])]
    assert lists(pair_data.masked_rows(ROWS, masks)) == [[-1.0], [], [], [-9999.0, -0.5, 0.0]]
    assert pair_data.masked_rows(ROWS, None) is ROWS


@pytest.mark.parametrize("rows", [[], [np.zeros(0)]])
def test_there_may_be_nothing(rows: pair_data.RowArrays) -> None:
    assert pair_data.count_values(rows, np.isnan) == 0
    assert not pair_data.rows_with(rows, np.isnan).any()
    assert lists(pair_data.map_rows(rows, np.isnan)) == lists(rows)
    assert lists(pair_data.masked_rows(rows, [np.zeros(0, bool)] * len(rows))) == lists(rows)
