"""Names that nobody else has."""

from __future__ import annotations

import re

from conquiet.kit.ids import incarnation


def test_an_incarnation_is_128_bits_in_hexadecimal() -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", incarnation())


def test_no_two_are_equal() -> None:
    assert len({incarnation() for _ in range(1_000)}) == 1_000
