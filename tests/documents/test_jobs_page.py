"""The page on jobs names every transition, option, key, script, table and metric, and is right about the fences."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from conquiet.jobs.job import TRANSITIONS, Job, JobState, Settlement
from conquiet.jobs.queue import JobQueue
from conquiet.jobs.store import JobRetention, JobStore
from conquiet.jobs.stores.memory import MemoryStore
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.jobs.stores.postgres.statements import migrations
from conquiet.jobs.stores.redis import RedisStore
from conquiet.jobs.worker import JobWorker
from conquiet.metrics import NAMES
from conquiet.metrics.jobs import JobOperation, JobResult
from conquiet.metrics.names import JOBS
from conquiet.wire.keys import JobKeys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
SCRIPTS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "conquiet/wire/lua").glob("jobs_*.lua")}
WHOLE = {name: text for name, text in SCRIPTS.items() if not text.startswith("-- Fragment")}
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
STEP = re.compile(r"^\| (?:`(\w*)`)? ?\| `(\w+)` \| (?:`(\w+)`|gone) \| (yes|no) \|", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \|.*\| (yes|no) \|$", re.MULTILINE)
MADE = re.compile(r"CREATE (TABLE|INDEX|FUNCTION) (?:IF NOT EXISTS )?(?:\{schema\}\.)?(\w+)")


def cells(section: str) -> list[list[str]]:
    """The rows of a section's tables, without their heads."""
    rows = [row[1:-1].split("|") for row in SECTIONS[section].splitlines() if row.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows]
    return [row for row in rows if row[0].startswith("`")]


def options(taker: type) -> dict[str, object]:
    """What a class takes by name, with the defaults."""
    found = inspect.signature(taker).parameters.values()
    return {one.name: one.default for one in found if one.default is not inspect.Parameter.empty}


def steps() -> dict[tuple[str, str], str]:
    found = [(before, event, after) for before, event, after, _ in STEP.findall(SECTIONS["States"]) if before]
    assert len({found[:2] for found in found}) == len(found)
    return {(before, event): after for before, event, after in found}


# --- the state machine ---------------------------------------------------------------------------------------


def test_the_table_of_states_is_the_machine() -> None:
    assert steps() == {(str(state), event): str(after or "") for (state, event), after in TRANSITIONS.items()}


def test_the_beginning_is_in_the_table_too() -> None:
    beginning = [step for step in STEP.findall(SECTIONS["States"]) if not step[0]]
    assert beginning == [("", "enqueue", str(JobState.READY), "no")]


def test_what_needs_the_token_is_what_a_worker_says() -> None:
    needs = {event for _, event, _, answer in STEP.findall(SECTIONS["States"]) if answer == "yes"}
    assert needs == {"renew", *get_args(get_type_hints(Settlement)["kind"])}


def test_every_property_of_a_job_is_named() -> None:
    properties = [name for name, member in vars(Job).items() if isinstance(member, property) and name != "is_finished"]
    fields = [name for name in Job.__struct_fields__ if not name.endswith("_ms") and "raw" not in name]
    for name in (*properties, *fields):
        assert f"`{name}`" in SECTIONS["States"]


# --- options and methods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("taker", [JobQueue, JobWorker, JobRetention])
def test_every_option_has_its_row(taker: type) -> None:
    rows = {row[0].strip("`") for row in cells("Options")}
    assert options(taker).keys() <= rows


def test_no_option_is_made_up() -> None:
    assert {row[0].strip("`") for row in cells("Options")} == {
        name for taker in (JobQueue, JobWorker, JobRetention) for name in options(taker)
    }


@pytest.mark.parametrize("taker", [JobQueue, JobWorker])
def test_defaults_that_are_numbers_are_right(taker: type) -> None:
    rows = {row[0].strip("`"): row[1] for row in cells("Options")}
    for name, default in options(taker).items():
        if isinstance(default, bool):
            assert rows[name] == str(default).lower()
        elif isinstance(default, int | float):
            assert rows[name] == str(default)
        elif default is None:
            assert rows[name] == "none" or name == "name"


def test_what_is_kept_by_default_is_right() -> None:
    rows = {row[0].strip("`"): row[1] for row in cells("Options")}
    assert rows["age"] == f"{options(JobRetention)['age'] / 86_400:g} days"  # type: ignore[operator]
    assert rows["count"] == f"{options(JobRetention)['count']:,}"
    assert rows["keep_failed"] == "`JobRetention(age=30 * 86_400)`"
    assert options(JobQueue)["keep_failed"] == JobRetention(age=30 * 86_400)


def test_every_method_for_operators_has_its_row() -> None:
    elsewhere = {"enqueue", "enqueue_many", "claim", "heartbeat", "ack", "nack", "release"}
    methods = {name for name, member in vars(JobQueue).items() if inspect.isfunction(member) and name[0] != "_"}
    assert {row[0].strip("`").partition("(")[0] for row in cells("Looking after")} == methods - elsewhere
    for name in elsewhere:
        assert re.search(rf"`{name}`|queue\.{name}\(", PAGE)


@pytest.mark.parametrize("store", [MemoryStore, RedisStore, PostgresStore])
def test_every_store_has_its_row_with_its_options(store: type[JobStore]) -> None:
    [row] = [row[0] for row in cells("Stores") if row[0].startswith(f"`{store.__name__}")]
    for name in options(store).keys() - {"clock"}:
        assert f"{name}=" in row


# --- Redis -----------------------------------------------------------------------------------------------------


def keys() -> dict[str, str]:
    """Each key as the page writes it, by its name in the code."""
    names = [name for name, member in vars(JobKeys).items() if isinstance(member, property)]
    return {name: getattr(JobKeys("Q"), name) for name in names}


def test_there_is_something_to_look_for() -> None:
    assert {"jobs", "leases", "news"} <= keys().keys()
    assert set(JobKeys("Q").all()) == set(keys().values())
    assert {"jobs_add", "jobs_settle"} <= WHOLE.keys()
    assert "jobs_record" in SCRIPTS.keys() - WHOLE.keys()


def test_every_key_has_its_row_and_no_other() -> None:
    rows = [row[0].strip("`") for row in cells("In Redis") if ":" in row[0]]
    assert sorted(rows) == sorted(keys().values())


def test_keys_are_of_the_type_that_the_page_says() -> None:
    words = {"HASH": "hash", "ZSET": "sorted set", "STREAM": "stream"}
    rows = {row[0].strip("`"): row[1] for row in cells("In Redis")}
    for name, key in keys().items():
        said = (inspect.getdoc(getattr(JobKeys, name)) or "").split()[0]
        assert rows[key] == words.get(said, "string"), name


def test_every_script_has_its_row_and_no_other() -> None:
    assert dict(ROW.findall(SECTIONS["In Redis"])).keys() == WHOLE.keys()


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_scripts_are_fenced_as_the_page_says(name: str) -> None:
    fenced = "token == ARGV" in WHOLE[name]
    assert dict(ROW.findall(SECTIONS["In Redis"]))[name] == ("yes" if fenced else "no")


# --- PostgreSQL --------------------------------------------------------------------------------------------------


def test_everything_that_migrations_make_has_its_row() -> None:
    script = PostgresStore("postgresql://nobody").sql().replace('"conquiet".', "{schema}.")
    dropped = set(re.findall(r"DROP \w+ {schema}\.(\w+)", script))
    made = {name: kind.lower() for kind, name in MADE.findall(script) if name not in dropped}
    assert {"migrations", "jobs", "jobs_line"} <= made.keys()
    assert {row[0].strip("`"): row[1] for row in cells("In PostgreSQL")} == made


def test_no_index_that_a_claim_reads_holds_finished_jobs() -> None:
    text = "".join(step.text for step in migrations())
    indexes: list[tuple[str, str]] = re.findall(r"CREATE INDEX (\w+) .*?\)(?:\s+WHERE (.*?))?;", text, re.DOTALL)
    dropped = re.findall(r"DROP INDEX {schema}\.(\w+)", text)
    made = {name: where for name, where in indexes if name not in dropped}
    listed = [row[0].strip("`") for row in cells("In PostgreSQL") if row[1] == "index"]
    assert sorted(made) == sorted(listed)
    assert all(made[name] for name in listed[:6])
    for name in ("jobs_line", "jobs_oldest", "jobs_again", "jobs_waiting", "jobs_leased"):
        assert re.match(r"state = '(ready|in_flight)'", made[name])


# --- metrics -----------------------------------------------------------------------------------------------------


def test_every_metric_is_named_with_its_labels_and_no_other() -> None:
    rows = {name: row[1] for row in cells("Metrics") for name in re.findall(r"`(conquiet_\w+)`", row[0])}
    assert rows.keys() == {name for name in NAMES if name.startswith("conquiet_jobs_")}
    for family in JOBS.values():
        assert rows[family.name] == ", ".join(family.labels)


def test_the_values_of_labels_are_named() -> None:
    rows = {row[0]: row[2] for row in cells("Metrics")}
    for value in get_args(JobOperation):
        assert f"`{value}`" in rows["`conquiet_jobs_stale_total`"]
    for value in get_args(JobResult):
        assert f"`{value}`" in rows["`conquiet_jobs_run_seconds`"]
