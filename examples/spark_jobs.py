"""A DataFrame becomes jobs: each partition enqueues its rows, a task fails on the way, and no job is there twice.

Spark tries a task again from its first row. A job that has an ID of its own is refused the second time, so the new try
adds what is missing. A worker without Spark does the jobs. Redis is started here; Java 17 or newer has to be there.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from itertools import islice

from pyspark import TaskContext
from pyspark.sql import Row, SparkSession

from conquiet.sync import DuplicateJobError, EmbeddedRedis, Job, JobQueue, JobSpec, JobWorker, RedisStore

LETTERS = 2_000


class Enqueue:
    """The rows of one partition as jobs. It is sent to the executors, so it holds a URL and no connection."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, rows: Iterable[Row]) -> None:
        letters = iter(rows)
        with RedisStore.connect(self.url) as store:  # one connection, which is closed when the task ends
            queue = JobQueue(store, "letters")
            while page := list(islice(letters, 500)):
                add(queue, [JobSpec({"to": row["customer"]}, job_id=f"letter-{row['id']}") for row in page])
                stumble()


def add(queue: JobQueue, jobs: list[JobSpec]) -> None:
    """Enqueue what is not there yet."""
    while jobs:
        try:
            queue.enqueue_many(jobs)
            return
        except DuplicateJobError as error:
            there = {*error.job_ids, *error.enqueued}
            jobs = [job for job in jobs if job.job_id not in there]


def stumble() -> None:
    """The first try of one task fails, when it has enqueued a part of its rows."""
    context = TaskContext.get()
    if context is not None and (context.partitionId(), context.attemptNumber()) == (1, 0):
        raise RuntimeError("the executor has lost its network")


def enqueue_all(url: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # the workers have to be this Python
    settings: dict[str, bool | float | int | str | None] = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
    }
    spark = SparkSession.builder.master("local[2,4]").config(map=settings).getOrCreate()
    try:
        letters = spark.range(0, LETTERS, 1, 4).selectExpr("id", "concat('customer-', id % 100) AS customer")
        letters.foreachPartition(Enqueue(url))
    finally:
        spark.stop()


def main() -> None:
    with EmbeddedRedis() as server:
        enqueue_all(server.url)
        with RedisStore.connect(server.url) as store:
            queue = JobQueue(store, "letters")
            print("enqueued:", {str(state): count for state, count in queue.counts().items()})
            print(f"{len(sent_by(queue))} letters were sent, each of them once")


def sent_by(queue: JobQueue) -> set[str]:
    """Do all jobs; the IDs."""
    sent: list[str] = []

    def send(job: Job) -> None:
        sent.append(job.id)
        if len(sent) == LETTERS:
            worker.stop()

    worker = JobWorker(queue, send, concurrency=1)
    worker.run()
    assert len(sent) == LETTERS
    return set(sent)


if __name__ == "__main__":
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        sys.exit("Spark needs Java 17 or newer: put it on the PATH, or set JAVA_HOME")
    main()
