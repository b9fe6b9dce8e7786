"""Workers of one queue as processes, to be stopped, killed and told to leave; and the servers of their jobs."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self
from urllib.parse import urlsplit

import psutil

from conquiet import DuplicateJobError, Job, JobQueue, JobSpec, JobState, PostgresStore, QueueError
from conquiet.sync import EmbeddedRedis
from tests.rigs.postgres import LocalPostgres
from tests.rigs.servers import on_a_port_in_sync
from tests.rigs.waiting import LONG, eventually
from tests.system.jobs_check import Plan
from tests.system.jobs_log import Disturbance, Log, now
from tests.system.jobs_process import QUEUE, store_at

__all__ = ["Crew", "Home", "PostgresHome", "RedisHome", "add", "all_finished", "all_jobs", "silenced"]

_ROOT: Final = Path(__file__).parents[2]


# --- servers ---------------------------------------------------------------------------------------------------------


class Home(Protocol):
    """A private server that keeps what it has confirmed over any end of its processes."""

    @property
    def url(self) -> str: ...
    def restart(self, *, crash: bool) -> None:
        """End it, politely or not, and start it again at the same place."""
        ...

    def processes(self) -> list[psutil.Process]:
        """All that the server consists of."""
        ...


class RedisHome:
    """A Redis that answers for a write only once it is in its file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server = self._made(None)

    def _made(self, port: int | None) -> EmbeddedRedis:
        settings = {"appendfsync": "always"}
        return on_a_port_in_sync(appendonly=True, directory=self._directory, port=port, settings=settings)

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self._server.url

    def restart(self, *, crash: bool) -> None:
        port = urlsplit(self.url).port
        if crash:
            os.kill(self._server.pid, signal.SIGKILL)
        self._server.close()
        self._server = self._made(port)
        self._server.open()

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self._server.pid)]


class PostgresHome:
    """A PostgreSQL."""

    def __init__(self) -> None:
        self.server = LocalPostgres()

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.__exit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self.server.dsn

    def restart(self, *, crash: bool) -> None:
        self.server.restart("immediate" if crash else "fast")

    def processes(self) -> list[psutil.Process]:
        first = psutil.Process(int((self.server.directory / "data" / "postmaster.pid").read_text().split()[0]))
        return [first, *first.children()]


@contextmanager
def silenced(home: Home) -> Generator[None]:
    """Within the block the server is there and does not answer."""
    processes = home.processes()
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            process.resume()


# --- workers ---------------------------------------------------------------------------------------------------------


class Crew:
    """Worker processes, the logs they write, and what was done to them. A name is used once."""

    def __init__(self, home: Home, directory: Path) -> None:
        self.home = home
        self.space = f"t_{secrets.token_hex(6)}"
        self.log = Log(directory)
        self.disturbances: list[Disturbance] = []
        self._frozen: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    @contextmanager
    def hired(cls, home: Home, directory: Path) -> Generator[Crew]:
        """A crew of which nobody outlives the block."""
        crew = cls(home, directory)
        try:
            yield crew
        finally:
            for process in crew._processes.values():
                process.kill()
                process.wait()

    @asynccontextmanager
    async def queue(self) -> AsyncGenerator[JobQueue]:
        """The test's own way to the jobs; makes the tables where there have to be some."""
        store = store_at(self.home.url, self.space)
        if isinstance(store, PostgresStore):
            await store.migrate()
        async with store:
            yield JobQueue(store, QUEUE)

    # --- the processes ------------------------------------------------------------------------------------------

    async def start(self, name: str, *more: str, url: str | None = None) -> None:
        """Start one; returns when it is about to work."""
        assert name not in self._processes
        words = ["--url", url or self.home.url, "--space", self.space, "--name", name, "--log", self.log.path(name)]
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.system.jobs_process", *words, *more],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            cwd=_ROOT,
        )
        await eventually(lambda: bool(self.log.noted(name, "ready")) or self.code(name) is not None, f"{name} is ready")
        assert self.code(name) is None

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def code(self, name: str) -> int | None:
        """The exit code, or ``None`` while it runs."""
        return self._processes[name].poll()

    async def ended(self, name: str, seconds: float = LONG) -> int:
        """The exit code, once there is one."""
        await eventually(lambda: self.code(name) is not None, f"{name} has ended", seconds)
        code = self.code(name)
        assert code is not None
        return code

    async def kill(self, name: str) -> int:
        """kill -9; the time just before it."""
        at = now()
        self.signal(name, signal.SIGKILL)
        self.disturbances.append(Disturbance("kill", name, self._frozen.pop(name, at)))
        await self.ended(name)
        return at

    async def freeze(self, name: str) -> int:
        """SIGSTOP; the time after which it did nothing more."""
        self._frozen[name] = now()
        self.signal(name, signal.SIGSTOP)
        process = psutil.Process(self._processes[name].pid)
        await eventually(lambda: process.status() == psutil.STATUS_STOPPED, f"{name} stands still")
        return now()

    def wake(self, name: str) -> None:
        """SIGCONT."""
        self.signal(name, signal.SIGCONT)
        self.disturbances.append(Disturbance("stop", name, self._frozen.pop(name), now()))

    def leave(self, name: str) -> None:
        """SIGTERM."""
        self.disturbances.append(Disturbance("leave", name, now()))
        self.signal(name, signal.SIGTERM)

    async def dismiss(self, *names: str) -> None:
        """SIGTERM; returns when they have ended, as they should."""
        for name in names:
            self.leave(name)
        for name in names:
            assert await self.ended(name) == 0
            assert self.log.noted(name, "ended")

    async def outage(self, *, crash: bool) -> None:
        """The server ends and comes back."""
        at = now()
        await asyncio.to_thread(self.home.restart, crash=crash)
        self.disturbances.append(Disturbance("outage", "", at, now()))

    # --- the work -----------------------------------------------------------------------------------------------

    async def begun(self, *names: str, count: int = 1) -> None:
        """Return once each of these has begun with so many jobs."""
        for name in names:
            await eventually(lambda name=name: len(self.log.runs_of(name)) >= count, f"{name} is at work")  # type: ignore[misc]


async def add(queue: JobQueue, plans: dict[str, Plan], work: float = 0.0) -> None:
    """Enqueue what is planned until it is confirmed, however often the store fails: an ID is taken only once."""
    specs = [
        JobSpec({"do": plan.do, "work": work}, id, plan.priority, plan.delay, plan.max_retries)
        for id, plan in plans.items()
    ]
    while True:
        try:
            await queue.enqueue_many(specs)
        except DuplicateJobError as error:
            if set(error.job_ids) != set(plans):  # neither as a whole nor not at all
                raise
        except QueueError:
            await asyncio.sleep(0.02)  # the pace, not a wait for anything
            continue
        return


async def all_jobs(queue: JobQueue) -> dict[str, Job]:
    """What the store has, of every state, as its pages tell it."""
    found: dict[str, Job] = {}
    for state in JobState:
        cursor: str | None = None
        while True:
            page = await queue.list_jobs(state, 1000, cursor)
            found.update((job.id, job) for job in page.jobs)
            cursor = page.cursor
            if cursor is None:
                break
    return found


async def all_finished(queue: JobQueue, seconds: float = LONG) -> None:
    """Return once nothing waits and nothing is in flight."""

    async def are_finished() -> bool:
        try:
            counts = await queue.counts()
        except QueueError:
            return False
        return not counts[JobState.READY] and not counts[JobState.IN_FLIGHT]

    await eventually(are_finished, "every job is finished", seconds)
