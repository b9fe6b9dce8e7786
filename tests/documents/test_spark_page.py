"""The page on Spark names every option, column and name that there is, with the right defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import conquiet.spark as spark
from conquiet.spark import deadletters, options, reading
from conquiet.spark.options import Place, ReadOptions, WriteOptions
from conquiet.topics.produce.once import CHUNK

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}


def cells(section: str) -> list[list[str]]:
    """The rows of a section's tables that begin with a name."""
    rows = [row[1:-1].split("|") for row in SECTIONS[section].splitlines() if row.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def rows() -> dict[str, str]:
    """Each option and its default, as the page has them."""
    return {name: row[1] for row in cells("Options") for name in re.findall(r"`(\w+)`", row[0])}


def test_every_option_has_its_row_and_no_other() -> None:
    assert rows().keys() == {*options._READ, *options._WRITE}


def test_defaults_are_right() -> None:
    place = Place("redis://localhost:6379", "orders")
    read, write = ReadOptions(place), WriteOptions(place)
    assert rows()["startingOffsets"] == f"`{read.start}`"
    assert rows()["splits"] == str(read.splits)
    assert rows()["pageSize"] == str(read.page)
    assert rows()["failOnDataLoss"] == str(read.fail_on_loss).lower()
    assert rows()["deadLetters"] == str(read.dead_letters).lower()
    assert rows()["nullKeys"] == f"`{write.null_keys}`"
    assert rows()["batchId"] == str(write.batch_id)
    assert [read.limit, read.group, read.schema, read.since, read.until] == [None] * 5
    for name in ("maxRowsPerBatch", "group", "schema", "startId", "endTime", "idColumn", "writeId", "namespace"):
        assert rows()[name] == "none"


def test_every_column_has_its_row_and_no_other() -> None:
    told = {row[0].strip("`"): row[1] for row in cells("Columns")}
    assert told.keys() == set(reading.columns("a INT").fieldNames())
    kinds = {field.name: field.dataType.simpleString() for field in reading.columns()}
    assert kinds == {name: kind for name, kind in told.items() if name not in ("headers", "_corrupt")} | {
        "headers": "map<string,string>"
    }


def test_every_column_of_a_dead_letter_is_named() -> None:
    for name in deadletters.columns().fieldNames():
        assert re.search(rf"`{name}`|\"{name}\"", SECTIONS["Dead letters"]) or name == "first_failed_at"


@pytest.mark.parametrize("name", sorted(set(spark.__all__) - {"TopicDataSource"}))
def test_every_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGE)


def test_every_argument_of_a_sink_is_named() -> None:
    taken = [one.name for one in inspect.signature(spark.TopicSink).parameters.values() if one.kind == one.KEYWORD_ONLY]
    assert taken
    for name in taken:
        assert f"`{name}`" in SECTIONS["Writing"]
    for field in dataclasses.fields(spark.Written):
        assert field.name in SECTIONS["Writing"]


def test_a_chunk_is_as_large_as_the_page_says() -> None:
    assert f"up to {CHUNK} rows" in SECTIONS["In Redis"]
    assert f"up to {CHUNK} rows" in SECTIONS["Tuning"]


def test_the_contents_lead_to_sections() -> None:
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    assert set(re.findall(r"\(#([^)]+)\)", PAGE)) <= anchors
