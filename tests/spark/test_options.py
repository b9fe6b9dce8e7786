"""The options of ``format("conquiet")``, without a Spark or a server."""

from __future__ import annotations

from typing import Any

import pytest

from conquiet.errors import ConfigError
from conquiet.spark.options import Place, ReadOptions, WriteOptions

PLACE = {"url": "redis://localhost", "topic": "orders"}
LAST = (1 << 64) - 1


def read(**options: str) -> ReadOptions:
    return ReadOptions.of({**PLACE, **options})


def write(**options: str) -> WriteOptions:
    return WriteOptions.of({**PLACE, **options})


def refused(of: Any, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        of(**options)
    return str(caught.value)


def test_what_holds_without_options() -> None:
    place = Place("redis://localhost", "orders")
    assert read() == ReadOptions(place)
    assert write() == WriteOptions(place)


def test_all_that_a_read_can_be_told() -> None:
    found = read(
        namespace="shop",
        startId="5-0",
        endId="9",
        splits="3",
        pageSize="500",
        maxRowsPerBatch="20",
        failOnDataLoss="FALSE",
        group="billing",
        schema="a INT",
    )
    place = Place("redis://localhost", "orders", "shop")
    assert found == ReadOptions(place, f"4-{LAST}", "9", "earliest", None, 3, 500, 20, False, "billing", "a INT")
    assert read(deadLetters="true").dead_letters


def test_all_that_a_write_can_be_told() -> None:
    found = write(
        key="customer", payload="body", headers="about", idColumn="nr", nullKeys="allow", writeId="w", batchId="7"
    )
    assert found == WriteOptions(found.place, "customer", "body", "about", "nr", "allow", "w", 7)


def test_the_case_of_names_does_not_matter() -> None:
    assert ReadOptions.of({"URL": "redis://localhost", "Topic": "orders", "MAXROWSPERBATCH": "5"}).limit == 5


def test_what_is_meant_for_spark_is_left_to_it() -> None:
    assert read(checkpointLocation="/tmp/x", queryName="q") == read()
    assert write(path="x", outputMode="append") == write()


@pytest.mark.parametrize(
    ("given", "meant"),
    [("startid", ""), ("strtId", "startId"), ("maxRowPerBatch", "maxRowsPerBatch"), ("failOnLoss", "failOnDataLoss")],
)
def test_a_name_that_is_nearly_right(given: str, meant: str) -> None:
    if not meant:
        assert read(**{given: "5-0"}) == read(startId="5-0")
        return
    assert f"did you mean {meant!r}?" in refused(read, **{given: "1"})


def test_a_name_that_is_near_to_none() -> None:
    assert "there are url, topic, namespace, key" in refused(write, zzzzzz="1")


def test_options_of_the_other_direction_are_unknown() -> None:
    assert "no option 'idcolumn'" in refused(read, idColumn="nr")
    assert "no option 'startid'" in refused(write, startId="5-0")


@pytest.mark.parametrize("missing", ["url", "topic"])
def test_what_is_needed(missing: str) -> None:
    given = {name: value for name, value in PLACE.items() if name != missing}
    for of in (ReadOptions.of, WriteOptions.of):
        with pytest.raises(ConfigError, match=f"{missing!r} is missing"):
            of(given)


@pytest.mark.parametrize(
    "options",
    [
        {"topic": "two words"},
        {"topic": ""},
        {"url": ""},
        {"namespace": "two words"},
        {"group": "two words"},
        {"splits": "0"},
        {"splits": "many"},
        {"pageSize": "-1"},
        {"maxRowsPerBatch": "0"},
        {"maxRowsPerBatch": "1.5"},
        {"failOnDataLoss": "yes"},
        {"deadLetters": "1"},
        {"startId": "-"},
        {"startId": "5-"},
        {"startId": "5-x"},
        {"startId": "٣-0"},
        {"startId": f"{LAST + 1}-0"},
        {"endId": f"5-{LAST + 1}"},
        {"endId": "$"},
        {"startTime": "yesterday"},
        {"endTime": "-5"},
        {"startingOffsets": "newest"},
        {"startingOffsets": "5-0"},
        {"startingOffsets": "[]"},
        {"startingOffsets": '{"0": 5}'},
        {"startingOffsets": '{"zero": "5-0"}'},
        {"startingOffsets": '{"-1": "5-0"}'},
        {"startingOffsets": '{"²": "5-0"}'},
        {"startingOffsets": '{"0": "latest"}'},
        {"schema": ""},
    ],
)
def test_what_a_read_cannot_be_told(options: dict[str, str]) -> None:
    [(name, value)] = options.items()
    text = refused(read, **options)
    assert name in text
    assert repr(value) in text or value == ""


@pytest.mark.parametrize(
    "options", [{"nullKeys": "maybe"}, {"writeId": "two words"}, {"writeId": "w", "batchId": "-1"}, {"key": ""}]
)
def test_what_a_write_cannot_be_told(options: dict[str, str]) -> None:
    assert list(options)[-1] in refused(write, **options)


def test_a_batch_is_known_by_the_write_that_it_belongs_to() -> None:
    assert "writeId" in refused(write, batchId="1")


@pytest.mark.parametrize(
    "options",
    [
        {"startId": "5-0", "startTime": "5"},
        {"endId": "5-0", "endTime": "5"},
        {"startId": "5-0", "startingOffsets": "latest"},
        {"startTime": "5", "startingOffsets": '{"0": "5-0"}'},
    ],
)
def test_the_same_said_twice(options: dict[str, str]) -> None:
    text = refused(read, **options)
    assert all(name in text for name in options)


@pytest.mark.parametrize(
    "options",
    [{"group": "g"}, {"schema": "a INT"}, {"startId": "5-0"}, {"endTime": "5"}, {"startingOffsets": "latest"}],
)
def test_dead_letters_have_no_ranges(options: dict[str, str]) -> None:
    assert "deadLetters" in refused(read, deadLetters="true", **options)


@pytest.mark.parametrize(
    ("id", "since"),
    [("5-3", "5-2"), ("5-0", f"4-{LAST}"), ("5", f"4-{LAST}"), ("0", "0-0"), ("0-0", "0-0"), (f"{LAST}-{LAST}", "")],
)
def test_a_read_begins_with_its_first_id(id: str, since: str) -> None:
    assert read(startId=id).since == (since or f"{LAST}-{LAST - 1}")


@pytest.mark.parametrize(
    ("time", "ms"),
    [
        ("1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T22:13:20", 1_700_000_000_000),
        ("2023-11-15T00:13:20.5+02:00", 1_700_000_000_500),
        ("2023-11-14T22:13:20.0001Z", 1_700_000_000_001),
        ("2023-11-14", 1_699_920_000_000),
        ("9" * 30, LAST),
    ],
)
def test_times_are_from_when_and_before_when(time: str, ms: int) -> None:
    assert read(startTime=time).since == f"{ms - 1}-{LAST}"
    assert read(endTime=time).until == f"{ms - 1}-{LAST}"


@pytest.mark.parametrize("time", ["0", "1969-07-20T20:17:40Z", "1970-01-01T00:00:00Z"])
def test_times_before_all_entries(time: str) -> None:
    assert read(startTime=time).since == "0-0"


def test_where_streams_begin() -> None:
    assert read(startingOffsets="latest").start == "latest"
    assert read(startingOffsets="earliest") == read()
    found = read(startingOffsets='{"0": "0", "1": "5-3", "02": "7"}')
    assert (found.start, found.starts) == ("earliest", {"0": "0-0", "1": "5-3", "2": "7-0"})
