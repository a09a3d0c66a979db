"""The dense matrix: exact cosines, missing vectors, growth."""

from __future__ import annotations

import numpy as np
import pytest

from memstream_server.core.arrays import BLOCK, Parts
from memstream_server.core.dense import DenseMatrix, multiply_rows
from memstream_server.core.values import Vector


def unit(*numbers: float) -> Vector:
    vector = np.array(numbers, np.float32)
    return vector / np.float32(np.linalg.norm(vector))


def test_cosines_by_slot_and_nan_where_there_is_no_vector() -> None:
    matrix = DenseMatrix(2)
    assert [matrix.append(each) for each in (unit(1, 0), None, unit(1, 1))] == [0, 1, 2]
    cosines = matrix.cosines(unit(1, 0))
    np.testing.assert_allclose(cosines[[0, 2]], [1.0, 0.5**0.5], rtol=1e-6)
    assert np.isnan(cosines[1])
    assert matrix.present.tolist() == [True, False, True]
    assert matrix.vector(1) is None


def test_vectors_are_filled_in_and_taken_away() -> None:
    matrix = DenseMatrix(2)
    matrix.append(None)
    matrix.append(unit(0, 1))
    matrix.set(0, unit(1, 0))
    matrix.set(1, None)
    cosines = matrix.cosines(unit(1, 0))
    assert cosines[0] == 1.0
    assert np.isnan(cosines[1])
    matrix.set(1, unit(1, 0))
    assert matrix.cosines(unit(1, 0)).tolist() == [1.0, 1.0]


def test_growth_and_compaction_keep_the_rows() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(1_000, 4)).astype(np.float32)
    one_by_one, at_once = DenseMatrix(4), DenseMatrix(4)
    for row in rows:
        one_by_one.append(row)
    at_once.extend(rows)
    query = unit(1, 2, 3, 4)
    np.testing.assert_array_equal(one_by_one.cosines(query), at_once.cosines(query))
    at_once.append(None)
    slots = np.array([3, 500, 1_000])
    at_once.keep(slots)
    np.testing.assert_allclose(at_once.cosines(query)[:2], rows[[3, 500]] @ query, rtol=1e-5)
    assert np.isnan(at_once.cosines(query)[2])
    assert len(at_once) == 3
    assert at_once.bytes < one_by_one.bytes
    for matrix in (one_by_one, at_once):
        restored = DenseMatrix(4)
        restored.unpack(matrix.pack())
        np.testing.assert_array_equal(restored.cosines(query), matrix.cosines(query))
    parts = at_once.pack()
    with pytest.raises(ValueError, match="slots without a row"):
        DenseMatrix(4).unpack(Parts({**parts.arrays, "vectors": parts.arrays["vectors"][1:]}, {}))


def test_many_blocks_are_one_matrix() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(3 * BLOCK + 5, 4)).astype(np.float32)
    matrix, query = DenseMatrix(4), unit(1, 2, 3, 4)
    matrix.extend(rows[: BLOCK - 1])
    matrix.append(rows[BLOCK - 1])
    assert matrix.bytes <= BLOCK * 4 * 4 + 2 * BLOCK
    matrix.extend(rows[BLOCK:])
    assert len(matrix) == len(rows)
    np.testing.assert_allclose(matrix.cosines(query), rows @ query, rtol=1e-5, atol=1e-6)
    for slot in (0, BLOCK - 1, BLOCK, 3 * BLOCK + 4):
        np.testing.assert_array_equal(matrix.vector(slot), rows[slot])
    matrix.set(2 * BLOCK, None)
    assert np.flatnonzero(np.isnan(matrix.cosines(query))).tolist() == [2 * BLOCK]
    slots = np.flatnonzero(np.arange(len(rows)) % 3)
    matrix.set(2 * BLOCK, rows[2 * BLOCK])
    matrix.keep(slots)
    np.testing.assert_allclose(matrix.cosines(query), rows[slots] @ query, rtol=1e-5, atol=1e-6)
    matrix.extend(rows[:7])
    np.testing.assert_allclose(matrix.cosines(query)[-7:], rows[:7] @ query, rtol=1e-5, atol=1e-6)


def test_adopted_rows_are_not_copied() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(3 * BLOCK, 4)).astype(np.float32)
    rows.flags.writeable = False
    matrix, query = DenseMatrix(4), unit(1, 2, 3, 4)
    matrix.extend(rows[:BLOCK], adopt=True)
    matrix.extend(rows[BLOCK : BLOCK + 10], adopt=True)
    matrix.extend(rows[BLOCK + 10 : BLOCK + 20])
    assert matrix.bytes - 10 * 4 * 4 < (BLOCK + 10) * (4 * 4 + 2)
    matrix.extend(rows[BLOCK + 20 : BLOCK + 30], adopt=True)
    for start in range(BLOCK + 30, len(rows), 100):
        matrix.extend(rows[start : start + 100])
    np.testing.assert_allclose(matrix.cosines(query), rows @ query, rtol=1e-5, atol=1e-6)
    places = (0, BLOCK - 1, BLOCK, BLOCK + 9, BLOCK + 10, BLOCK + 19, BLOCK + 20, BLOCK + 29, BLOCK + 30, 3 * BLOCK - 1)
    for slot in places:
        np.testing.assert_array_equal(matrix.vector(slot), rows[slot])
    changed = rows.copy()
    for number, slot in enumerate(places):
        changed[slot] = number
        matrix.set(slot, changed[slot])
    np.testing.assert_allclose(matrix.cosines(query), changed @ query, rtol=1e-5, atol=1e-6)
    slots = np.arange(5, len(rows), 2)
    matrix.keep(slots)
    np.testing.assert_allclose(matrix.cosines(query), changed[slots] @ query, rtol=1e-5, atol=1e-6)


def test_a_vector_is_not_shared_with_the_caller() -> None:
    matrix = DenseMatrix(2)
    given = unit(1, 0)
    matrix.append(given)
    given[:] = 0
    taken = matrix.vector(0)
    assert taken is not None
    taken[:] = 0
    assert matrix.cosines(unit(1, 0)).tolist() == [1.0]


def test_another_length_is_refused() -> None:
    matrix = DenseMatrix(3)
    with pytest.raises(ValueError, match="3 numbers"):
        matrix.append(unit(1, 0))
    with pytest.raises(ValueError, match="3 numbers"):
        matrix.cosines(unit(1, 0))
    assert len(matrix) == 0


def test_scan_returns_current_cosines() -> None:
    random = np.random.default_rng(1)
    rows = random.normal(size=(2 * BLOCK + 5, 4)).astype(np.float32)
    matrix, query = DenseMatrix(4), unit(1, 2, 3, 4)
    matrix.extend(rows[:-1])
    with matrix.scan(query) as scan:
        matrix.set(3, rows[-1])
        scan.compute()
        matrix.set(BLOCK, None)
        matrix.set(7, None)
        matrix.set(7, rows[0])
        matrix.extend(rows[-2:])
        np.testing.assert_array_equal(scan.estimate()[0], matrix.cosines(query))
        assert np.flatnonzero(np.isnan(scan.estimate()[0])).tolist() == [BLOCK]
        matrix.keep(np.arange(0, len(matrix), 3))
        matrix.append(rows[5])
        np.testing.assert_array_equal(scan.estimate()[0], matrix.cosines(query))
    matrix.set(0, None)
    assert 0 not in scan.changed, "a closed scan records no changes"


def test_a_scan_of_an_empty_matrix() -> None:
    matrix = DenseMatrix(2)
    with matrix.scan(unit(1, 0)) as scan:
        scan.compute()
        assert len(scan.estimate()[0]) == 0
        matrix.append(unit(1, 0))
        assert scan.estimate()[0].tolist() == [1.0]


def test_a_matrix_is_large_by_its_bytes() -> None:
    matrix = DenseMatrix(1_536)
    matrix.extend(np.zeros((600, 1_536), np.float32))
    assert not matrix.large
    matrix.extend(np.zeros((100, 1_536), np.float32))
    assert matrix.large


@pytest.mark.parametrize("dimension", [4, 48, 384])
def test_a_product_does_not_depend_on_the_other_rows(dimension: int) -> None:
    random = np.random.default_rng(2)
    rows, query = random.normal(size=(22, dimension)).astype(np.float32), random.normal(size=dimension)
    query = query.astype(np.float32)
    alone = np.concatenate([multiply_rows(row[None], query) for row in rows])
    np.testing.assert_allclose(alone, rows.astype(np.float64) @ query, atol=1e-4)
    for count in range(len(rows)):
        for part in (slice(count), slice(len(rows) - count, None)):
            np.testing.assert_array_equal(multiply_rows(rows[part], query), alone[part])
