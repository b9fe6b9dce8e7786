"""Every example runs, as a user would run it, and says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SAYS = {
    "admin": "trimmed 8: no more than the group has finished",
    "demo": "lost                 0",
    "metrics": 'conquiet_queue_messages_ack_total{stream="orders"} 100.0',
    "ordered_by_key": "alice  1 2 3 4 5",
    "quickstart": "5 in the stream, 0 not acknowledged",
    "quickstart_sync": "5 in the stream, 0 not acknowledged",
    "retry_and_dead_letters": "retries exhausted after 3 attempts",
    "topics": "of them again, 0 lost",
    "worker_with_database": "6 orders, 6000 cents, 0 not acknowledged",
}


def test_no_example_is_forgotten() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}
    assert found == SAYS.keys()


@pytest.mark.parametrize("name", sorted(SAYS))
@pytest.mark.timeout(180)
def test_example_runs(name: str) -> None:
    command = [sys.executable, "-W", "error", f"examples/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert SAYS[name] in done.stdout


def test_worker_shows_the_duplicate_being_absorbed() -> None:
    command = [sys.executable, "examples/worker_with_database.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "killed before the acknowledgment" in done.stdout
    assert "booked order 3 (seen before: absorbed)" in done.stdout


def test_the_dead_letter_is_handled_after_its_replay() -> None:
    command = [sys.executable, "examples/retry_and_dead_letters.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    before, replayed, after = done.stdout.partition("replayed: 1\n")
    assert "order 2, attempt 3: failed" in before
    assert replayed
    assert "order 2, attempt 1: 1250 cents" in after


def test_the_survivor_takes_every_partition_over() -> None:
    command = [sys.executable, "examples/topics.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    told = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert told["shared"].count("'victim'") == 2
    assert told["taken over"].count("'survivor'") == 4


def test_demo_recovers_what_the_dead_consumer_held() -> None:
    command = [sys.executable, "examples/demo.py", "--messages", "900"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    rows = dict(line.strip().rsplit(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  "))
    assert rows["sent"] == rows["handled"] == "900"
    assert int(rows["recovered"]) >= 1
    assert rows["lost"] == rows["still pending"] == "0"
