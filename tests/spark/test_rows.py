"""What becomes of the values of a row; no Spark is needed for that."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from conquiet.errors import ConfigError, PayloadError
from conquiet.spark.rows import Columns, Layout, Unfit, UnfitPayload, are_json, as_texts, by_type, json_text
from conquiet.spark.versions import arrow_schema
from conquiet.spark.writing import _rows_of, _typed

TEXT = StringType()
MOMENT = datetime(2024, 2, 29, 12, 30, 15, 123456)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker that is not in UTC."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def layout(*names: str, **wanted: Any) -> Layout:
    return Layout.of(names, Columns(**wanted))


def schema(**fields: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


# --- which column is what ---------------------------------------------------------------------------------


def test_without_a_payload_column_all_but_the_headers_are_the_payload() -> None:
    found = layout("customer", "amount", "meta", key="customer", headers="meta", id="amount")
    row = ("alice", 5, {"trace": "1"})
    assert found.payload_of(row) == '{"customer":"alice","amount":5}'
    assert (found.key, found.headers, found.id) == (0, 2, 1)


def test_columns_are_known_by_their_names_only_beside_a_payload() -> None:
    assert layout("key", "payload", "headers", "id") == Layout(("key", "payload", "headers", "id"), 1, 0, 2, None, True)
    assert layout("key", "headers") == Layout(("key", "headers"), None, None, None, None, True)
    assert layout("key", "body", payload="body").key == 0
    named = layout("key", "payload", "body", "c", payload="body", key="c")
    assert (named.payload, named.key) == (2, 3)


def test_a_key_that_was_asked_for_must_be_there_in_each_row() -> None:
    asked = layout("payload", "key", key="key")
    text = "column 'key' is null: a key is needed; nullKeys='allow' sends such rows without one"
    with pytest.raises(Unfit, match=text) as caught:
        asked.key_of(None)
    assert not isinstance(caught.value, UnfitPayload)
    assert layout("payload", "key").key_of(None) is None
    assert layout("payload", "key", key="key", null_keys=True).key_of(None) is None


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"key": "nope"}, "key is column 'nope', but there are only a, b"),
        ({"payload": "nope"}, "payload is column 'nope', but there are only a, b"),
        ({"headers": "nope"}, "headers is column 'nope', but there are only a, b"),
        ({"id": "nope"}, "idColumn is column 'nope', but there are only a, b"),
    ],
)
def test_a_column_that_is_not_there_is_named(wanted: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layout("a", "b", **wanted)


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are two columns 'b'"):
        layout("a", "b", "b")


@pytest.mark.parametrize(
    ("wanted", "kind", "text"),
    [
        ({"key": "c"}, DoubleType(), "key is column 'c' of type double: strings or integers can be"),
        ({"key": "c"}, BinaryType(), "key is column 'c' of type binary"),
        ({"id": "c"}, BooleanType(), "idColumn is column 'c' of type boolean"),
        ({"headers": "c"}, TEXT, "headers is column 'c' of type string, not map<string,string>"),
        ({"headers": "c"}, MapType(TEXT, LongType()), r"of type map<string,bigint>, not map<string,string>"),
        ({}, BinaryType(), "payload cannot be carried as JSON: c is of type binary, which JSON cannot carry"),
        ({}, DayTimeIntervalType(), "c is of type interval day to second, which JSON cannot carry"),
        ({}, VariantType(), "c is of type variant, which JSON cannot carry"),
        ({}, ArrayType(schema(x=BinaryType())), r"c\[\].x is of type binary"),
        ({}, MapType(TEXT, BinaryType()), r"c\{\} is of type binary"),
        ({}, MapType(DateType(), TEXT), "c has keys of type date, and those of JSON are strings"),
    ],
)
def test_a_column_of_an_unfit_type_is_named(wanted: dict[str, str], kind: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layout("a", "c", **wanted).check(schema(a=TEXT, c=kind))


def test_columns_that_are_not_sent_may_be_of_any_type() -> None:
    layout("payload", "raw").check(schema(payload=TEXT, raw=BinaryType()))
    layout("k", "n", "h", key="n", id="k", headers="h").check(schema(k=TEXT, n=LongType(), h=MapType(TEXT, TEXT)))


# --- payloads ---------------------------------------------------------------------------------------------


def test_values_are_written_as_to_json_would(berlin: None) -> None:
    row = Row(
        text='"ä\n',
        whole=-(2**63),
        half=0.5,
        yes=True,
        nothing=None,
        price=Decimal("12.10"),
        big=Decimal("12345678901234567890123456789012345.678"),
        tiny=Decimal("1E-7"),
        round=Decimal("1E+3"),
        at=MOMENT,
        day=date(2024, 2, 29),
        inner=Row(list=[Row(x=1), None], map={"a": [Decimal("0.0")], "b": None}),
        counts={1: "one"},
        pair=(1, "two"),
    )
    text = layout(*row.asDict()).payload_of(row)
    assert '"price":12.10,"big":12345678901234567890123456789012345.678,"tiny":0.0000001,"round":1000,' in text
    assert json.loads(text, parse_float=str) == {
        "text": '"ä\n',
        "whole": -(2**63),
        "half": "0.5",
        "yes": True,
        "nothing": None,
        "price": "12.10",
        "big": "12345678901234567890123456789012345.678",
        "tiny": "0.0000001",
        "round": 1000,
        "at": "2024-02-29T11:30:15.123456Z",
        "day": "2024-02-29",
        "inner": {"list": [{"x": 1}, None], "map": {"a": ["0.0"], "b": None}},
        "counts": {"1": "one"},
        "pair": [1, "two"],
    }


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (datetime(2024, 7, 1, 12), "2024-07-01T10:00:00Z"),
        (datetime(2024, 10, 27, 2, 30), "2024-10-27T00:30:00Z"),
        (datetime(2024, 10, 27, 2, 30, fold=1), "2024-10-27T01:30:00Z"),
        (datetime(2024, 1, 1, tzinfo=UTC), "2024-01-01T00:00:00Z"),
        (datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-8))), "2024-01-01T08:00:00Z"),
    ],
)
def test_instants_are_in_utc(berlin: None, moment: datetime, text: str) -> None:
    assert layout("at").payload_of((moment,)) == f'{{"at":"{text}"}}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "column 'c' is nan, which JSON cannot carry"),
        ([1.0, -math.inf], r"column 'c\[1\]' is -inf, which JSON cannot carry"),
        (Row(a={"b": math.nan}), "column 'c.a.b' is nan"),
        (Decimal("NaN"), "column 'c' is NaN"),
        (b"x", "column 'c' is a bytes, which JSON cannot carry"),
        (bytearray(b"x"), "column 'c' is a bytearray"),
        (timedelta(1), "column 'c' is a timedelta"),
        ({True: 1}, "column 'c' has the key True, and those of an object are strings"),
    ],
)
def test_what_json_cannot_carry_is_refused(value: Any, text: str) -> None:
    with pytest.raises(UnfitPayload, match=text) as caught:
        layout("c").payload_of((value,))
    said = caught.value.at(3, 17)
    assert type(said) is PayloadError
    assert str(said).startswith("payload cannot be carried as JSON: partition 3, row 17, column 'c")


@pytest.mark.parametrize("text", ['{"a": 1.50}', " [1, 2]\n", '"a"', "null", "12345678901234567890.0", '{"a":1,"a":2}'])
def test_a_payload_of_text_is_written_as_it_is(text: str) -> None:
    assert layout("payload", "other").payload_of((text, 1)) == text
    assert are_json(["1", text])


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "NaN", '{"a": 1} x', "hello", '{"a": NaN}', '["\x01"]'])
def test_a_payload_of_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(UnfitPayload, match="column 'payload' is not JSON text: "):
        json_text("payload", text)
    assert not are_json(["1", text])


def test_a_payload_may_be_any_value_but_null() -> None:
    assert json_text("p", Row(a=1)) == '{"a":1}'
    assert json_text("p", 7) == "7"
    with pytest.raises(UnfitPayload, match="column 'p' is null: a message has a payload"):
        json_text("p", None)
    assert not are_json(["1", None])


def test_a_local_time_may_be_the_payload_itself() -> None:
    convert = by_type(TimestampNTZType())
    assert convert is not None
    assert json_text("p", convert(datetime(2020, 1, 2, 3, 4, 5))) == '"2020-01-02T03:04:05"'
    assert json_text("p", [convert(datetime(2020, 1, 2))]) == '["2020-01-02T00:00:00"]'


def test_only_columns_of_one_plain_type_are_texts() -> None:
    assert as_texts(["a", "\u00e4"]) == ["a", "\u00e4"]
    assert as_texts([0, -12]) == ["0", "-12"]
    for values in (["a", None], ["a", 1], [True], [1.5], ["\ud800"], []):
        assert as_texts(values) is None


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_written_reads_back_the_same(value: Any) -> None:
    written = layout("v").payload_of((value,))
    assert orjson.loads(written) == {"v": value}
    assert json_text("payload", written) == written


# --- keys, headers, IDs -----------------------------------------------------------------------------------


def test_keys_and_ids_are_texts() -> None:
    found = layout("k", "i", key="k", id="i")
    assert [found.key_of(value) for value in ("ä", "", 7, -1)] == ["ä", "", "7", "-1"]
    assert [found.id_of(value) for value in ("a", 0)] == ["a", "0"]
    with pytest.raises(Unfit, match="column 'k' is a float: strings and integers can be keys and IDs"):
        found.key_of(1.5)
    for nothing in (None, ""):
        with pytest.raises(Unfit) as caught:
            found.id_of(nothing)
        said = caught.value.at(1, 0)
        assert type(said) is ConfigError
        assert str(said) == "partition 1, row 0: column 'i' is null or empty: each row needs an ID"


def test_headers_are_texts_by_their_names() -> None:
    found = layout("payload", "headers")
    assert found.headers_of({"a": "1", "b": ""}) == '{"a":"1","b":""}'
    assert found.headers_of([("a", "1")]) == '{"a":"1"}'
    assert found.headers_of({}) is None
    assert found.headers_of(None) is None
    with pytest.raises(Unfit, match="column 'headers' has the header 'a': None, which is not two strings"):
        found.headers_of({"a": None})


# --- what Arrow and rows have otherwise -------------------------------------------------------------------


def test_arrow_and_rows_give_the_same_payload(berlin: None) -> None:
    inner = schema(local=TimestampNTZType(), map=MapType(TEXT, TimestampNTZType()), n=IntegerType())
    kinds = schema(
        at=TimestampType(),
        local=TimestampNTZType(),
        day=DateType(),
        price=DecimalType(10, 2),
        inner=inner,
        list=ArrayType(TimestampNTZType()),
        deep=ArrayType(inner),
        map=MapType(TEXT, inner),
        none=inner,
    )
    part: dict[str, Any] = {"local": MOMENT, "map": {"a": MOMENT, "b": None}, "n": 1}
    aware = MOMENT.replace(tzinfo=UTC)
    arrow = pa.RecordBatch.from_pylist(
        [
            {
                "at": aware,
                "local": MOMENT,
                "day": date(2024, 1, 1),
                "price": Decimal("1.50"),
                "inner": part,
                "list": [MOMENT, None],
                "deep": [part, None],
                "map": {"k": part},
                "none": None,
            }
        ],
        schema=arrow_schema(kinds),
    )
    nested = Row(**part)
    row = Row(
        at=aware.astimezone().replace(tzinfo=None),
        local=MOMENT,
        day=date(2024, 1, 1),
        price=Decimal("1.50"),
        inner=nested,
        list=[MOMENT, None],
        deep=[nested, None],
        map={"k": nested},
        none=None,
    )
    found = Layout.of(kinds.fieldNames(), Columns())
    text = found.payload_of(_typed(row, [by_type(field.dataType) for field in kinds.fields]))
    assert found.payload_of(_rows_of(kinds, arrow)[0]) == text
    written = "2024-02-29T12:30:15.123456"
    wanted = {"local": written, "map": {"a": written, "b": None}, "n": 1}
    assert json.loads(text) == {
        "at": written + "Z",
        "local": written,
        "day": "2024-01-01",
        "price": 1.5,
        "inner": wanted,
        "list": [written, None],
        "deep": [wanted, None],
        "map": {"k": wanted},
        "none": None,
    }


def test_most_types_tell_by_themselves_what_they_are() -> None:
    assert by_type(schema(a=TEXT, b=ArrayType(LongType()), c=schema(d=TimestampType()))) is None
