"""What stands in a payload becomes what Spark's own ``from_json`` makes of it; the differences are listed here too."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from inspect import signature
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from conquiet.errors import ConfigError
from conquiet.spark.payload import PayloadParser, schema_of
from conquiet.spark.versions import HANDS_OVER_ARROW

OPTIONS = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt"}


def of_values(*values: str) -> list[str]:
    return [f'{{"a":{value}}}' for value in values]


def of_texts(*texts: str) -> list[str]:
    return of_values(*(json.dumps(text) for text in texts))


# What both read alike: the schema, and the payloads.
ALIKE: dict[str, tuple[str, Sequence[str | None]]] = {
    "records": (
        "a int, b string",
        [
            None,
            "",
            " \n",
            "{}",
            "null",
            "[]",
            '[{"a":1}]',
            "1",
            '"x"',
            ' {"a" : 1 , "b":"x"} ',
            '{"a":1,"b":"x"',
            '{"a":1,"b":tru}',
            '{"a":1,"b":"tr',
            '{"a":1,"z":tru}',
            '{"a":01}',
            '{"a":1,}',
            "{a:1}",
            '{"a":1 /*c*/}',
            '{"A":1}',
            '{"a":null,"b":null}',
            '{"a":"x","b":"y"}',
            '{"a":1,"z":[1,{"b":2}]}',
            '{"a":"x","z":[1,{"b":2}]}',
            '{"a":"x","b":"y"',
            '{"a":1,"a":2}',
            '{"a":1,"a":null}',
            '{"b":"\\u00e9\\n\\u0000\\ud83d\\ude00 é"}',
            '{"\\u0061":1}',
            '{"b":"a\nb"}',
            "\ufeff{}",
            "x",
        ],
    ),
    "texts": (
        "a string",
        of_values(
            "1",
            "-0.0",
            "1.5",
            "123456789012345678901234567890",
            "true",
            "null",
            "{}",
            "[]",
            '""',
            '{"x" : 1, "y":[1, "é"]}',
        ),
    ),
    "bytes": ("a tinyint", of_values("127", "-128", "256", "-129", "1.0", "1e0", '"1"', "true", "-0", "[]", '""')),
    "shorts": ("a smallint", of_values("32767", "32768", "-32768", "-32769", "1.0")),
    "ints": ("a int", of_values("2147483647", "2147483648", "1.0", "99999999999999999999", '"x"')),
    "longs": ("a bigint", of_values("9223372036854775807", "9223372036854775808", "-9223372036854775808", "1e3")),
    "booleans": ("a boolean", of_values("true", "false", "1", '"true"', '""', "null")),
    "decimals": (
        "a decimal(10,2)",
        of_values(
            *("1", "1.005", "-1.005", "1.004999", "1e2", "1E-30", "1.00499999999999999999999999999999999999999"),
            *("99999999.994", "99999999.995", "-99999999.995", "1e400", "1e1000000000", "true", "[]", "null"),
            *('"1.5"', '" 1.5"', '"+1.5"', '"1e2"', '"x"', '""', '"1,000"', '"1."', '".5"', '"NaN"', '"0x1"', '"1_0"'),
        ),
    ),
    "long decimals": (
        "a decimal(38,18)",
        of_values("12345678901234567890.123456789012345678", "1e19", "1e20", "0.1234567890123456785"),
    ),
    "whole decimals": ("a decimal(38,0)", of_values("9" * 38, "9" * 39, "9" * 38 + ".5", '"' + "9" * 38 + '"')),
    "binary": (
        "a binary",
        of_texts("YQ==", "YQ", "Y Q==", "YR==", "", "a-_", "YQ=", "YWI=", "YWJj", "ÿ", "=")
        + of_values("1", "[]", "null"),
    ),
    "structs": (
        "s struct<a:int,b:string>, c int",
        [
            '{"s":{"a":1,"b":"x"},"c":1}',
            '{"s":{"a":"x","b":"y"},"c":1}',
            '{"s":[],"c":1}',
            '{"s":1,"c":1}',
            '{"s":null,"c":"x"}',
            '{"s":{},"c":1}',
            '{"s":"","c":1}',
            '{"c":2}',
        ],
    ),
    "arrays": (
        "a array<int>, c int not null",
        [
            '{"a":[1,null,2],"c":1}',
            '{"a":[1,"x"],"c":1}',
            '{"a":[]}',
            '{"a":{},"c":1}',
            '{"a":1}',
            '{"a":null,"c":"x"}',
        ],
    ),
    "arrays of arrays": ("a array<array<int>>", of_values("[[1],[null],null]", '[[1],["q"]]')),
    "arrays of structs": (
        "a array<struct<b:int,c:string>>",
        of_values('[{"b":1},{"b":"x","c":"y"},null,{"z":1}]', '[{"b":1},1]', "[{}]"),
    ),
    "maps": ("a map<string,int>, c int", of_values('{"x":1,"y":null}', '{"x":1,"y":"z"}', "[]", "{}", "null", '"x"')),
    "maps of structs": ("a map<string,struct<b:int>>", of_values('{"x":{"b":1},"y":{"b":"q"}}', '{"x":1}')),
    "maps of arrays": ("a map<string,array<int>>", of_values('{"x":[1],"y":["q"]}', '{"x":[1,2],"":[]}')),
    "deep": (
        "a struct<b:array<struct<c:map<string,decimal(4,1)>,d:date>>>",
        of_values(
            '{"b":[{"c":{"x":1.25,"y":"2"},"d":"2020-02-29"},{"c":null}]}',
            '{"b":[{"c":{"x":12345},"d":"2020-02-29"},{"d":"x","c":{}}]}',
        ),
    ),
    "dates": (
        "a date",
        of_texts(
            *("2020-01-02", "2020-1-2", "2020", "2020-01", "2020-01-02T10:00:00", "2020-01-02 x", "2020-01-02T"),
            *(" 2020-01-02 ", "\t2020-01-02\n", "2020-01-02\u00a0", "+2020-01-02", "2020-02-30", "2019-02-29"),
            *("0001-01-01", "9999-12-31", "1582-10-10", "1500-02-29", "", "x", "2020-01-02Z", "2020-W01-1"),
            *("2020-001", "2020-13-01", "2020-01-02-03", "now", "2020/01/02", "020-01-02", "2020-001-02"),
            *("٢٠٢٠-01-02", "2020-00-01"),
        )
        + of_values("1", "1.5", "null", "[]"),
    ),
}
TIMES = of_texts(
    *("2020-01-02T03:04:05Z", "2020-01-02T03:04:05", "2020-01-02 03:04:05", "2020-01-02T03:04:05.123456"),
    *("2020-01-02T03:04:05.1", "2020-01-02T03:04:05.123456789Z", "1969-12-31T23:59:59.9999999", "2020-01-02T03:04:05."),
    *("2020-01-02T03:04:05+01:00", "2020-01-02T03:04:05+0100", "2020-01-02T03:04:05+01", "2020-01-02T03:04:05+1"),
    *("2020-01-02T03:04:05+1:30", "2020-01-02T03:04:05 +01:00", "2020-01-02T03:04:05 UTC", "2020-01-02T03:04:05UTC"),
    *(
        "2020-01-02T03:04:05-0130",
        "2020-01-02T03:04:05-130",
        "2020-01-02T03:04:05+01:3",
        "2020-01-02T03:04:05+01:30:15",
    ),
    *(
        "2020-01-02T03:04:05-00:00",
        "2020-01-02T03:04:05+18:00",
        "2020-01-02T03:04:05+18:01",
        "2020-01-02T03:04:05+19:00",
    ),
    *("2020-01-02T03:04:05GMT+1", "2020-01-02T03:04:05 Z", "2020-01-02T03:04:05[UTC]", "2020-01-02T03:04:05.123+05:30"),
    *(
        "2020-01-02T03:04",
        "2020-01-02T03",
        "2020-01-02T",
        "2020-01-02",
        "2020-1-2",
        "2020-01",
        "2020",
        "2020-01-02T3:4:5",
    ),
    *("2020-01-02t03:04:05z", "2020-01-02T03:04:05z", "2020-01-02T24:00:00", "2020-01-02T03:04:60", "x", ""),
    *("2020-01-02T03:04:05,5", " 2020-01-02T03:04:05Z ", "20200102T030405", "+2020-01-02T03:04:05", "1577934245"),
    *("2020-02-30T00:00:00", "2020-01-02T03:04Z", "2020-01-02Z", "2020-01-02T03:04:05ZZ", "2020-01-02T003:04:05"),
    *("2020-01-02  03:04:05", "now", "0001-01-01T00:00:00", "9999-12-31T23:59:59.999999"),
) + of_values("0", "1577934245", "-1", "1.5", "1e3", "99999999999999999999", "true", "[]", "null")
ALIKE["local timestamps"] = ("a timestamp_ntz", TIMES)

FLOATS = of_values(
    *("1", "1.5", "0.1", "16777217", "123456789012345678901234567890", "1e400", "-1e400", "3.5e38", "1e-400", "null"),
    *('"NaN"', '"Infinity"', '"+Infinity"', '"-Infinity"', '"+INF"', '"-INF"', '"INF"', '"1.5"', '""', "true", "[]"),
)


def ours(schema: str, payloads: Sequence[str | bytes | None]) -> list[tuple[Any, str | None]]:
    raw = [text.encode() if isinstance(text, str) else text for text in payloads]
    structs, corrupt = PayloadParser(schema_of(schema)).columns(raw)
    structs.validate(full=True)
    return list(zip(structs.to_pylist(maps_as_pydicts="strict"), corrupt.to_pylist(), strict=True))


def theirs(spark: SparkSession, schema: str, payloads: Sequence[str | None]) -> list[tuple[Any, str | None]]:
    frame = spark.createDataFrame(list(enumerate(payloads)), "place int, payload string").coalesce(1)
    parsed = F.from_json("payload", f"{schema}, _corrupt string", OPTIONS)
    rows = [row.record for row in frame.select("place", parsed.alias("record")).orderBy("place").collect()]
    return [(None, None) if row is None else as_ours(row) for row in rows]


def as_ours(row: Row) -> tuple[Any, str | None]:
    record = row.asDict(recursive=True)
    corrupt = record.pop("_corrupt")
    return plain(record), corrupt


def plain(value: Any) -> Any:
    """The same with bytes for bytearrays."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return bytes(value) if isinstance(value, bytearray) else value


@pytest.mark.parametrize("name", ALIKE)
def test_a_payload_becomes_what_from_json_makes_of_it(spark: SparkSession, name: str) -> None:
    schema, payloads = ALIKE[name]
    for payload, mine, expected in zip(payloads, ours(schema, payloads), theirs(spark, schema, payloads), strict=True):
        assert mine == expected, payload


def test_a_moment_is_the_one_that_from_json_reads(spark: SparkSession) -> None:
    frame = spark.createDataFrame(list(enumerate(TIMES)), "place int, payload string").coalesce(1)
    record = F.from_json("payload", "a timestamp, _corrupt string", OPTIONS)
    # As numbers: a collected timestamp is in the zone of the machine.
    columns = [F.unix_micros(record["a"]).alias("a"), record["_corrupt"].alias("corrupt")]
    expected = [(row.a, row.corrupt) for row in frame.select("place", *columns).orderBy("place").collect()]
    structs, corrupt = PayloadParser(schema_of("a timestamp")).columns([text.encode() for text in TIMES])
    mine = list(zip(structs.field("a").cast(pa.int64()).to_pylist(), corrupt.to_pylist(), strict=True))
    for payload, one, other in zip(TIMES, mine, expected, strict=True):
        assert one == other, payload


@pytest.mark.parametrize("kind", ["double", "float"])
def test_a_float_is_the_one_that_from_json_reads(spark: SparkSession, kind: str) -> None:
    expected = theirs(spark, f"a {kind}", FLOATS)
    for payload, mine, other in zip(FLOATS, ours(f"a {kind}", FLOATS), expected, strict=True):
        assert repr(mine) == repr(other), payload  # NaN is not equal to itself


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**33), 2**33)
    | st.sampled_from(["", "x", "1", "2020-01-02", "YQ=="])
    | st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0xFFFF), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcdm"), inner, max_size=4),
    max_leaves=8,
)
SHAPE = "a int, b string, c array<struct<a:bigint,b:boolean>>, d struct<a:binary,m:map<string,int>>, m decimal(12,3)"


def test_whatever_comes_is_read_alike(spark: SparkSession) -> None:
    payloads: list[str] = []

    @settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from("abcdmz"), json_values, max_size=5) | json_values)
    def collect(value: object) -> None:
        payloads.append(json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    collect()
    mine = ours(SHAPE, payloads)
    assert any(corrupt is None for _, corrupt in mine)
    assert any(corrupt for _, corrupt in mine)
    for payload, one, other in zip(payloads, mine, theirs(spark, SHAPE, payloads), strict=True):
        assert one == other, payload


# --- the differences, and what needs no Spark ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        ("a int", "{'a':1}"),
        ("a double", '{"a":NaN}'),
        ("a int", '{"a":1} x'),
        ("a string", '{"a":"\\ud800"}'),
        ("a tinyint", '{"a":128}'),
        ("a timestamp", '{"a":9223372036854775807}'),
        ("a timestamp", '{"a":"T03:04:05"}'),
        ("a timestamp", '{"a":"10000-01-01T00:00:00"}'),
        ("a timestamp", '{"a":"2020-01-02T03:04:05 Europe/Paris"}'),
        ("a date", '{"a":"18262"}'),
        ("a date", '{"a":"0000-01-01"}'),
        ("a binary", '{"a":"YWJj\\n"}'),
        ("a array<int>", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    ],
)
def test_what_spark_would_take_and_we_do_not_is_corrupt(schema: str, payload: str) -> None:
    assert ours(schema, [payload]) == [({"a": None}, payload)]


def test_what_is_no_text_keeps_its_own_text_in_a_string() -> None:
    payloads = ['{"a":1.50}', '{"a":1e5}', '{"a":{"x" : 1.0,\n "y":["\\u00e9" ]}}']
    texts = ["1.50", "1e5", '{"x":1.0,"y":["\\u00e9"]}']
    assert ours("a string", payloads) == [({"a": text}, None) for text in texts]


def test_of_a_key_that_is_there_twice_the_last_value_counts() -> None:
    payloads = ['{"a":"x","a":2}', '{"a":1,"a":"x"}']
    assert ours("a int", payloads) == [({"a": 2}, None), ({"a": None}, payloads[1])]
    assert ours("a map<string,int>", ['{"a":{"x":1,"x":2}}']) == [({"a": {"x": 2}}, None)]


@pytest.mark.parametrize("payload", [b'{"a":1,"b":"\xff"}', b'{"a":1,"z":"\xc3("}', b"\xff", b'{"a":"x","z":"\xff"}'])
def test_bytes_that_are_no_text_are_corrupt_and_shown_with_replacements(payload: bytes) -> None:
    expected = ({"a": None, "b": None}, payload.decode(errors="replace"))
    assert ours("a int, b string", [b'{"a":1}', payload, b'{"a":2}'])[1] == expected


def test_the_neighbours_of_a_corrupt_record_are_unharmed() -> None:
    payloads = [
        '{"a":[1],"m":{"k":{"b":1}}}',
        "x",
        None,
        '{"a":["x"],"m":{"k":{"b":"y"}}}',
        '{"a":[],"m":{}}',
        "",
        '{"a":[2,3]}',
    ]
    assert ours("a array<int>, m map<string,struct<b:int>>", payloads) == [
        ({"a": [1], "m": {"k": {"b": 1}}}, None),
        ({"a": None, "m": None}, "x"),
        (None, None),
        ({"a": None, "m": {"k": {"b": None}}}, payloads[3]),
        ({"a": [], "m": {}}, None),
        (None, None),
        ({"a": [2, 3], "m": None}, None),
    ]


def demanded(schema: StructType) -> Any:
    """The Arrow schema that Spark compares a batch with; the older ones mean UTC without being told."""
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)


@pytest.mark.parametrize("payloads", [[], [None], [b""], [b"{}"]])
def test_a_batch_of_nothing_has_the_types_of_every_other(payloads: list[bytes | None]) -> None:
    parser = PayloadParser(schema_of(SHAPE))
    structs, corrupt = parser.columns(payloads)
    assert len(structs) == len(corrupt) == len(payloads)
    assert structs.type == demanded(StructType([StructField("p", parser.schema)])).field("p").type
    assert corrupt.type == pa.string()


def test_the_arrow_types_are_those_that_spark_demands() -> None:
    parser = PayloadParser(
        schema_of(
            "a boolean, b byte, c short, d int not null comment 'x', e long, f float, g double, h decimal(20,3), "
            "i string, j binary, k date, l timestamp, m timestamp_ntz, n array<int>, o map<string,array<date>>, "
            "p struct<q:varchar(3)>"
        )
    )
    structs, corrupt = parser.columns([b"{}"])
    schema = StructType([StructField("payload", parser.schema), StructField("_corrupt", StringType())])
    made = pa.RecordBatch.from_arrays([structs, corrupt], names=["payload", "_corrupt"])
    assert demanded(schema).equals(made.schema)


def test_values_are_those_of_python() -> None:
    record, corrupt = ours(
        "a decimal(5,2), b date, c timestamp, d timestamp_ntz, e double",
        ['{"a":1.005,"b":"2020-01-02","c":"2020-01-02T03:04:05+01:00","d":"2020-01-02T03:04:05.5","e":"-INF"}'],
    )[0]
    assert corrupt is None
    assert record == {
        "a": Decimal("1.01"),
        "b": date(2020, 1, 2),
        "c": datetime(2020, 1, 2, 2, 4, 5, tzinfo=UTC),
        "d": datetime(2020, 1, 2, 3, 4, 5, 500_000),
        "e": -math.inf,
    }


# --- the schema ------------------------------------------------------------------------------------------------------

WRITTEN = [
    "a INT, b STRING",
    "a int,b:string",
    "struct<a:int, b: struct<c:array<map<string,decimal(10,2)>>>>",
    "STRUCT<a INT NOT NULL COMMENT 'x'>",
    "`a b` INT, `a``b` STRING, `,` date",
    "a tinyint, b byte, c smallint, d short, e integer, f bigint, g long, h real, i float, j double, k binary",
    "a boolean, b date, c timestamp, d timestamp_ntz, e timestamp_ltz, f dec, g numeric(5), h decimal ( 38 , 38 )",
    "a int not null comment 'its', b int comment \"x\", c int comment 'it\\'s\\n'",
    "int int, struct struct<array:array<int>>, comment string comment 'comment', not int not null",
    "\n a\tint ,\nb array < array<int>>\n",
    "a1 int, 1a int, _x int",
    "a struct<b:int not null, c string comment 'y'>",
    *(["a int comment 'it''s'"] if HANDS_OVER_ARROW else []),  # only 4.0 does not read that
]


def nullable(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, nullable(f.dataType), True, f.metadata) for f in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(nullable(kind.elementType))
    return MapType(nullable(kind.keyType), nullable(kind.valueType)) if isinstance(kind, MapType) else kind


@pytest.mark.parametrize("text", WRITTEN)
def test_ddl_is_read_as_spark_reads_it(spark: SparkSession, text: str) -> None:
    theirs = DataType.fromDDL(text)
    assert schema_of(text).jsonValue() == nullable(theirs).jsonValue()
    assert schema_of(theirs.json()) == schema_of(text)


REFUSED = [
    "a",
    "a int,",
    "a int b int",
    "a int)",
    "a decimal(39)",
    "a decimal(5,6)",
    "a decimal()",
    "a decimal(5,)",
    "a array<int",
    "a array<>",
    "a array",
    "a map<string>",
    "1 int",
    "a-b int",
    "a int not",
    "a int comment x",
    "a char",
    "a 'int'",
    "a foo",
    "`a int",
    "a int; b int",
    "'a' int",
    ", a int",
    "struct<a int",
    "struct<a int> b",
]


@pytest.mark.parametrize("text", REFUSED)
def test_ddl_that_spark_refuses_is_refused(spark: SparkSession, text: str) -> None:
    with pytest.raises(PySparkException):
        DataType.fromDDL(text)
    with pytest.raises(ConfigError, match="schema: "):
        schema_of(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "schema: is empty"),
        (" \n", "schema: is empty"),
        ("a interval day to second", "expected a type that a JSON payload can have at character 2, found 'interval'"),
        ("a int, b variant", "at character 9, found 'variant'"),
        ("a int, b", "expected a type at character 8, found its end"),
        ("array<int>", "expected a type at character 5, found '<'"),
        ("a int; b int", "cannot read '; b int' at character 5"),
        ("a struct<>", "expected the name of a field at character 9, found '>'"),
        ("a map<int,string>", "the keys of the map 'a' have to be STRING"),
        ("a struct<b:array<map<date,int>>>", "the map 'a.b.element'"),
        ("a int, a string", "the payload has the field 'a' twice"),
        ("s struct<a:int,a:int>", "the struct 's' has the field 'a' twice"),
        ('`a"b` int', "holds a quote"),
        ("{", "schema: is not the JSON of a StructType"),
        ('{"type":"array"}', "not of 'array'"),
        ("{}", "not of None"),
        ('{"type":"struct"}', "lacks 'fields'"),
        ('{"type":"struct","fields":[]}', "the payload has no fields"),
        ('{"type":"struct","fields":1}', "is not the JSON"),
        ('{"type":"struct","fields":[{"name":"a","type":"foo","nullable":true,"metadata":{}}]}', "foo"),
    ],
)
def test_a_schema_that_cannot_be_meant_is_refused_with_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema_of(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("kind", [DayTimeIntervalType(), VariantType(), NullType()])
def test_a_type_that_json_cannot_carry_is_refused_by_the_name_of_its_field(kind: DataType) -> None:
    inner = StructType([StructField("ok", LongType()), StructField("bad", MapType(StringType(), kind))])
    with pytest.raises(ConfigError, match=r"the field 'list\.element\.bad\.value' is of the type"):
        PayloadParser(StructType([StructField("list", ArrayType(inner))]))


def test_a_schema_is_delivered_with_every_field_nullable() -> None:
    given = StructType([StructField("a", ArrayType(IntegerType(), False), False), StructField("b", DecimalType(5, 1))])
    assert PayloadParser(given).schema == nullable(given)


def test_a_parser_can_be_pickled() -> None:
    parser = pickle.loads(pickle.dumps(PayloadParser(schema_of("a decimal(5,2)"))))
    assert parser.columns([b'{"a":1.5}'])[0].to_pylist() == [{"a": Decimal("1.50")}]


def test_a_schema_is_read_without_a_jvm() -> None:
    code = (
        "from conquiet.spark.payload import schema_of\n"
        "from pyspark import SparkContext\n"
        "assert schema_of('a int, b array<date>').simpleString() == 'struct<a:int,b:array<date>>'\n"
        "assert SparkContext._gateway is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
