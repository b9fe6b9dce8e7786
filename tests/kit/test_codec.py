"""JSON that comes back equal, or is refused with the place that is at fault."""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections import OrderedDict
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conquiet import ConfigError, PayloadError
from conquiet.kit.codec import MAX_DEPTH, UNREADABLE, decode, encode, encode_object

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=40,
)


class Colour(Enum):
    RED = "red"


def lists(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def dicts(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def _round() -> dict[str, Any]:
    value: dict[str, Any] = {"a": [1]}
    value["a"].append(value)
    return value


REFUSED: dict[str, tuple[object, str, str]] = {
    "a list": ([1], "$", "must be a dict, not list"),
    "a string": ("text", "$", "must be a dict, not str"),
    "nothing": (None, "$", "must be a dict, not NoneType"),
    "NaN": ({"a": math.nan}, "$.a", "nan"),
    "NaN beside a null": ({"a": None, "b": math.nan}, "$.b", "nan"),
    "NaN inside": ({"a": [1, {"b": math.nan}]}, "$.a[1].b", "nan"),
    "infinity": ({"a": math.inf}, "$.a", "inf"),
    "minus infinity inside": ({"a": {"b": [-math.inf]}}, "$.a.b[0]", "-inf"),
    "bytes": ({"a": b"x"}, "$.a", "bytes"),
    "bytes inside": ({"a": [[b"x"]]}, "$.a[0][0]", "bytes"),
    "a bytearray": ({"a": bytearray(b"x")}, "$.a", "bytearray"),
    "70 digits": ({"a": int("1" * 70)}, "$.a", "64 bits"),
    "70 digits inside": ({"a": [int("1" * 70)]}, "$.a[0]", "64 bits"),
    "just too large": ({"a": 2**64}, "$.a", "64 bits"),
    "just too small": ({"a": -(2**63) - 1}, "$.a", "64 bits"),
    "an int as a key": ({1: "a"}, "$", "key 1 of type int"),
    "an int as a key inside": ({"a": [{1: "a"}]}, "$.a[0]", "key 1 of type int"),
    "None as a key": ({"a": {None: 1}}, "$.a", "NoneType"),
    "a tuple": ({"a": (1, 2)}, "$.a", "tuple"),
    "a tuple inside": ({"a": {"b": [(1,)]}}, "$.a.b[0]", "tuple"),
    "a set": ({"a": {1}}, "$.a", "set"),
    "a datetime": ({"a": datetime(2026, 1, 1, tzinfo=UTC)}, "$.a", "datetime"),
    "a date inside": ({"a": [date(2026, 1, 1)]}, "$.a[0]", "date"),
    "a UUID": ({"a": UUID(int=1)}, "$.a", "UUID"),
    "a Decimal": ({"a": Decimal("1.5")}, "$.a", "Decimal"),
    "an enum": ({"a": Colour.RED}, "$.a", "Colour"),
    "an object": ({"a": object()}, "$.a", "object"),
    "a complex number": ({"a": 1j}, "$.a", "complex"),
    "a lone surrogate": ({"a": "\ud800"}, "$.a", "surrogate"),
    "a lone surrogate inside": ({"a": [1, {"b": "x\udfff"}]}, "$.a[1].b", "surrogate"),
    "a lone surrogate as a key": ({"\ud800": 1}, "$", "surrogate"),
    "a lone surrogate as a key inside": ({"a": {"\ud800": [1]}}, "$.a", "surrogate"),
    "lists one too deep": ({"a": lists(MAX_DEPTH)}, "$.a", "deeper than 254"),
    "lists 10,000 deep": ({"a": lists(10_000)}, "$.a", "deeper than 254"),
    "dicts one too deep": (dicts(MAX_DEPTH + 1), "$.a.a", "deeper than 254"),
    "dicts 10,000 deep": (dicts(10_000), "$.a.a", "deeper than 254"),
    "itself": (_round(), "$.a[1].a[1]", "deeper than 254"),
}

ALLOWED: dict[str, Any] = {
    "empty": {},
    "an empty key": {"": ""},
    "containers": {"a": [], "b": {}, "c": [[], [{}]]},
    "the largest": {"a": 2**64 - 1, "b": [2**64 - 1]},
    "the smallest": {"a": -(2**63), "b": [-(2**63)]},
    "53 bits and more": {"a": 2**53 + 1, "b": [-(2**53) - 1]},
    "unicode": {"ключ": 'Grüße 世界 \U0001f680 \u2028 \x00 \x7f \\ " /'},
    "minus zero": {"a": -0.0, "b": [-0.0]},
    "floats": {"a": [0.1, 1e308, 5e-324, 2.2250738585072014e-308, 1.0, 123456789.123456789]},
    "words of JSON": {"a": "null", "null": "NaN", "b": None, "c": [None, True, False]},
    "254 lists deep": {"a": lists(MAX_DEPTH - 1)},
    "254 dicts deep": dicts(MAX_DEPTH),
    "an ordered dict": OrderedDict(b=1, a=[2]),
}


@pytest.mark.parametrize(("payload", "path", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_json_would_change_is_refused_with_its_place(payload: object, path: str, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        encode_object(payload)
    error = caught.value
    assert isinstance(error, ConfigError)
    assert isinstance(error, ValueError)
    assert error.path == path or error.path.startswith(f"{path}[") or error.path.startswith(f"{path}.")
    assert reason in error.reason
    assert error.path in str(error)
    assert error.reason in str(error)
    assert len(str(error)) < 1_000
    str(error).encode()  # it can be logged


@pytest.mark.parametrize("payload", ALLOWED.values(), ids=ALLOWED)
def test_what_json_can_carry_comes_back_equal(payload: dict[str, Any]) -> None:
    data = encode_object(payload)
    assert repr(decode(data)) == repr(dict(payload))
    assert json.loads(data.decode("utf-8")) == payload


@pytest.mark.slow
@settings(deadline=None, database=None, max_examples=100)
@given(JSON)
def test_any_json_value_comes_back_equal(value: Any) -> None:
    # repr tells -0.0 from 0.0, and 1 from True and 1.0
    assert repr(decode(encode(value))) == repr(value)


@pytest.mark.slow
@settings(deadline=None, database=None, max_examples=100)
@given(st.dictionaries(st.text(), JSON, max_size=8))
def test_any_json_object_comes_back_equal_and_is_json_to_others(payload: dict[str, Any]) -> None:
    data = encode_object(payload)
    assert repr(decode(data)) == repr(payload)
    assert json.loads(data) == payload


@pytest.mark.slow
@settings(deadline=None, database=None, max_examples=200)
@given(
    st.recursive(
        st.none()
        | st.integers()
        | st.floats()
        | st.text(st.characters())
        | st.text(st.characters(categories=["Cs"]), max_size=2)
        | st.binary(max_size=3)
        | st.tuples(st.integers())
        | st.dates()
        | st.decimals(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        ),
    )
)
def test_anything_is_either_refused_or_comes_back_equal(value: Any) -> None:
    try:
        data = encode_object({"a": value})
    except PayloadError as error:
        refusal: PayloadError | None = error
    else:
        refusal = None
        assert repr(decode(data)) == repr({"a": value})
    assert refusal is None or refusal.path.startswith("$.a")


def test_a_shared_value_is_no_loop() -> None:
    shared = [1]
    assert decode(encode_object({"a": shared, "b": [shared, shared]})) == {"a": [1], "b": [[1], [1]]}


def test_the_first_fault_in_reading_order_is_named() -> None:
    with pytest.raises(PayloadError) as caught:
        encode_object({"a": [1, {"b": b"1"}], "c": math.nan})
    assert caught.value.path == "$.a[1].b"


def test_a_deep_stack_gets_an_answer_too() -> None:
    """Within a few frames of Python's own limit, encoding still answers in kind."""
    payload = dicts(MAX_DEPTH)

    def below(frames: int) -> object:
        if frames:
            return below(frames - 1)
        try:
            return decode(encode_object(payload))
        except PayloadError as error:
            return error

    depth = len(_frames())
    for room in (300, 200, 100, 60):
        result = below(sys.getrecursionlimit() - depth - room)
        assert result == payload or isinstance(result, PayloadError)


def _frames() -> list[Any]:
    frame: Any = sys._getframe()
    frames: list[Any] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def test_the_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(PayloadError("$.a", "is wrong")))
    assert (error.path, error.reason, str(error)) == ("$.a", "is wrong", str(PayloadError("$.a", "is wrong")))


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"{a:1}", b'{"a":NaN}', b'{"a":1}{}', b'"\xff"', b"\xff\xfe", b"[" * 100_000, b'{"a":1e999}', b"\x00"],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_json_is_unreadable(data: bytes) -> None:
    with pytest.raises(UNREADABLE):
        decode(data)


@pytest.mark.parametrize("value", [datetime(2026, 1, 2, tzinfo=UTC), UUID(int=1), b"raw", (1, 2)])
def test_a_refusal_names_the_remedy(value: object) -> None:
    with pytest.raises(PayloadError, match=r"\$\.when is of type .*: send what JSON has, .* TypedCodec"):
        encode({"when": value})
