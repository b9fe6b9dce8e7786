"""A Spark cluster on this machine: a standalone master and two workers, from the PySpark that is installed.

Its nodes have the dependencies of conquiet, but not conquiet: programs bring the package with them, as the
documentation says. Every process is ended by its ID.
"""

from __future__ import annotations

import os
import re
import signal
import site
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import psutil
import pyspark

from tests.rigs.waiting import LONG
from tests.spark.conftest import ROOT

__all__ = ["Cluster", "Program", "clean_environment", "environment", "packed", "standalone", "submitted", "zipped"]

SPARK: Final = Path(pyspark.__file__).parent
_HEAP: Final = {"SPARK_DAEMON_MEMORY": "128m", "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
_AT: Final = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED: Final = "Registering worker"
_SMALL: Final = {
    "spark.cores.max": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.memory": "512m",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def spark_home(place: Path) -> Path:
    """The installed Spark without its zip of PySpark, so that each Python process takes the compiled modules instead.

    Modules of a zip are compiled again whenever a process starts, which takes three times as long as all else.
    """
    place.mkdir(exist_ok=True)
    for part in ("bin", "jars", "sbin"):
        if not (place / part).exists():
            (place / part).symlink_to(SPARK / part)
    return place


class Program:
    """A process in a group of its own, and its log. It ends with the block."""

    def __init__(self, command: list[str], log: Path, place: Path, environ: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=place, env=environ, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def says(self, pattern: str | re.Pattern[str], count: int = 1) -> re.Match[str]:
        """The match, once there are so many of them; the test fails if the process ends before."""
        deadline = time.monotonic() + 6 * LONG
        while len(found := list(re.finditer(pattern, self.log))) < count:
            assert self.is_running(), f"it ended with {self._process.returncode}:\n{self.log[-6_000:]}"
            assert time.monotonic() < deadline, f"it did not say {pattern}:\n{self.log[-6_000:]}"
            time.sleep(0.02)
        return found[count - 1]

    def ends(self) -> str:
        """What it has said, once it has ended well."""
        code = self._process.wait(12 * LONG)
        assert code == 0, f"it ended with {code}:\n{self.log[-6_000:]}"
        return self.log

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def _running(command: list[str], log: Path, place: Path, environ: Mapping[str, str]) -> Iterator[Program]:
    program = Program(command, log, place, environ)
    try:
        yield program
    finally:
        program.kill()


@dataclass(frozen=True)
class Cluster:
    """Where the master is, and the workers, whose children the executors are."""

    url: str
    workers: tuple[Program, ...]

    def executors(self) -> list[psutil.Process]:
        return [child for worker in self.workers for child in worker.process.children()]


def clean_environment() -> dict[str, str]:
    """This environment without anything that shows where the checkout is."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))}


@contextmanager
def standalone(place: Path) -> Iterator[Cluster]:
    """A master with two workers of two slots each, in a folder where nothing else is."""
    environ = {**clean_environment(), **_HEAP, "SPARK_HOME": str(spark_home(place / "spark"))}
    launch, here = str(SPARK / "bin" / "spark-class"), ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        command = [launch, "org.apache.spark.deploy.master.Master", *here]
        master = stack.enter_context(_running(command, place / "master.log", place, environ))
        url = master.says(_AT)[1]
        workers: list[Program] = []
        for number in (1, 2):
            room = ["-c", "2", "-m", "2g", "-d", str(place / f"worker-{number}"), url]
            command = [launch, "org.apache.spark.deploy.worker.Worker", *here, *room]
            log = place / f"worker-{number}.log"
            workers.append(stack.enter_context(_running(command, log, place, environ)))
        master.says(_REGISTERED, 2)
        yield Cluster(url, tuple(workers))


@contextmanager
def submitted(
    place: Path, *words: str, python: Path | str, settings: Mapping[str, str] | None = None, **environ: str
) -> Iterator[Program]:
    """``spark-submit`` of a program, with the rest of the command in ``words``; from a folder that has no checkout."""
    confs = [word for item in {**_SMALL, **(settings or {})}.items() for word in ("--conf", "=".join(item))]
    command = [str(SPARK / "bin" / "spark-submit"), *confs, *words]
    home = str(spark_home(place / "spark"))
    given = {**clean_environment(), "SPARK_HOME": home, "PYSPARK_PYTHON": str(python), **environ}
    with _running(command, place / "driver.log", place, given) as program:
        yield program


def environment(place: Path) -> Path:
    """The Python of an environment that has all packages of this one, but not conquiet; as a node would have it."""
    venv.create(place, symlinks=True, with_pip=False)
    python = place / "bin" / "python"
    [packages] = place.glob("lib/python*/site-packages")
    # What lies beside a package by a .pth file of its own, as a checkout does, is not found by way of this one.
    (packages / "dependencies.pth").write_text("\n".join(path for path in _packages() if path))
    command = [str(python), "-c", "import redis, pyspark, msgspec\nimport conquiet"]
    done = subprocess.run(command, cwd=place, env=clean_environment(), capture_output=True, text=True, check=False)
    assert "No module named 'conquiet'" in done.stderr, done.stderr
    return python


def _packages() -> list[str]:
    found = {str(Path(path)) for path in site.getsitepackages()}
    return [path for path in dict.fromkeys(sys.path) if path in found]


def zipped(place: Path) -> Path:
    """The package as a zip."""
    found = place / "conquiet.zip"
    with ZipFile(found, "w") as file:
        for path in _sources():
            file.write(path, path.relative_to(ROOT))
    return found


def packed(place: Path) -> Path:
    """An environment with conquiet, packed. Other packages lie where they are: to pack all takes a minute."""
    made = place / "made"
    environment(made)
    found = place / "environment.tar.gz"
    [packages] = made.glob("lib/python*/site-packages")
    with tarfile.open(found, "w:gz", compresslevel=1) as file:
        file.add(made, ".")
        for path in _sources():
            file.add(path, packages.relative_to(made) / path.relative_to(ROOT))
    return found


def _sources() -> list[Path]:
    return [path for path in (ROOT / "conquiet").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
