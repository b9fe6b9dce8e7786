"""Cutting into chunks: nothing is lost, order stays, and no chunk is larger than it may be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conquiet.kit.chunks import by_number, by_size, chunks

things = st.lists(st.binary(max_size=8), max_size=30)
most = st.integers(1, 10)


@given(things, most)
def test_by_number(values: list[bytes], most: int) -> None:
    found = list(by_number(values, most))
    assert [value for some in found for value in some] == values
    assert all(len(some) == most for some in found[:-1])
    assert all(1 <= len(some) <= most for some in found)


@given(things, most)
def test_by_size(values: list[bytes], most_bytes: int) -> None:
    found = list(by_size(values, most_bytes, len))
    assert [value for some in found for value in some] == values
    assert all(some and (len(some) == 1 or sum(map(len, some)) <= most_bytes) for some in found)
    # No chunk could have taken the first thing of the next.
    assert all(sum(map(len, one)) + len(other[0]) > most_bytes for one, other in pairwise(found))


@given(things, most, most)
def test_by_both(values: list[bytes], most: int, most_bytes: int) -> None:
    found = list(chunks(values, most, most_bytes, len))
    assert [value for some in found for value in some] == values
    assert all(len(some) == 1 or (len(some) <= most and sum(map(len, some)) <= most_bytes) for some in found)
