"""Every example runs, as a user would run it, and says what it should."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SAYS = {
    "admin": "trimmed 8: no more than the group has finished",
    "balanced_streams": "30 streams, 120 events read",
    "demo": "lost                 0",
    "jobs": "replayed: {'ready': 1, 'in_flight': 0, 'succeeded': 4, 'failed': 0}",
    "jobs_postgres_outbox": "2 orders, job of the third: None",
    "jobs_redis": "image-3 succeeded by worker-2: {'width': 1500}, before that: ['worker-1: lease expired']",
    "metrics": 'conquiet_queue_messages_ack_total{stream="orders"} 100.0',
    "ordered_by_key": "alice  1 2 3 4 5",
    "quickstart": "5 in the stream, 0 not acknowledged",
    "quickstart_sync": "5 in the stream, 0 not acknowledged",
    "retry_and_dead_letters": "retries exhausted after 3 attempts",
    "spark_pipeline": "to the cent and each of them once, in the topic and in Parquet",
    "topics": "of them again, 0 lost",
    "worker_with_database": "6 orders, 6000 cents, 0 not acknowledged",
}


def test_no_example_is_forgotten() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}
    assert found == SAYS.keys()


@pytest.mark.parametrize("name", sorted(SAYS))
@pytest.mark.timeout(420)
def test_example_runs(name: str) -> None:
    command = [sys.executable, "-W", "error", f"examples/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
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


def test_the_streams_of_the_killed_consumer_are_taken_over_and_shared() -> None:
    command = [sys.executable, "examples/balanced_streams.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    told = {name: text.strip() for name, _, text in (line.partition(":") for line in done.stdout.splitlines())}
    owned = int(told["killed"].rsplit(maxsplit=1)[1])
    assert owned > 0
    assert sum(ast.literal_eval(told["taken over"]).values()) == owned
    assert ast.literal_eval(told["evened out"]) == {"bob": 15, "carol": 15}
    assert told["finished"].endswith(" 0 lost")


def test_demo_recovers_what_the_dead_consumer_held() -> None:
    command = [sys.executable, "examples/demo.py", "--messages", "900"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    rows = dict(line.strip().rsplit(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  "))
    assert rows["sent"] == rows["handled"] == "900"
    assert int(rows["recovered"]) >= 1
    assert rows["lost"] == rows["still pending"] == "0"


def test_a_job_is_tried_again_and_a_rejected_one_is_not() -> None:
    command = [sys.executable, "examples/jobs.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines() if " attempts " in line]
    assert {row[0]: (row[1], row[2]) for row in rows} == {
        "ann@example.org": ("succeeded", "1"),
        "boss@example.org": ("succeeded", "1"),
        "later@example.org": ("succeeded", "1"),
        "nobody": ("failed", "1"),
        "slow@example.org": ("succeeded", "2"),
    }
    assert done.stdout.index("sent to boss") < done.stdout.index("sent to ann")


def test_the_job_of_a_killed_worker_is_done_by_another() -> None:
    command = [sys.executable, "examples/jobs_redis.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    before, killed, after = done.stdout.partition("worker-1 was killed: ")
    assert "worker-1: image-3, attempt 1" in before
    assert killed
    assert "worker-2: image-3, attempt 2" in after
    assert "worker-2 ended with 0" in after


def test_a_transaction_that_is_rolled_back_leaves_neither_row_nor_job() -> None:
    command = [sys.executable, "examples/jobs_postgres_outbox.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "rolled back: order 3 is out of stock" in done.stdout
    assert "order 2 is confirmed" in done.stdout
    assert "order 3 is confirmed" not in done.stdout
