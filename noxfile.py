"""The project's commands: ``nox`` checks everything, ``nox -s demo`` shows it at work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]

HERE = Path(__file__).parent
# To compile the tests takes longer than to collect them: once is enough, out of the way of the sources.
KEPT = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(HERE / ".nox" / "bytecode")}
CODE = ["conquiet", "tests", "examples", "noxfile.py"]
PEERS = ["arq~=0.28", "asyncpg~=0.30", "pgqueuer~=1.6", "saq~=0.26", "streaq~=7.2"]
# Tests of real processes that hold them to a time, or need all of the machine.
ALONE = [
    f"tests/system/test_{name}.py"
    for name in ("balance_kill", "jobs_blocking", "jobs_chaos", "jobs_kill", "topics_chaos", "topics_scale")
]
MATRIX = [
    ("3.11", "pyspark~=4.0.0"),
    ("3.11", "pyspark~=4.1.0"),
    ("3.11", "pyspark~=4.2.0"),
    ("3.12", "pyspark~=4.3.0"),
    ("3.13", "pyspark~=4.3.0"),
]


class Environment:
    """A virtual environment that sessions share, so that a fresh machine installs things once."""

    def __init__(self, session: nox.Session, extra: str = "dev", python: str = "", pin: str = "") -> None:
        self.session = session
        self.place = HERE / ".nox" / "-".join(part for part in ("env", extra, python, pin) if part)
        installed = self.place / "installed-for"
        wanted = f"{sys.version}\n{(HERE / 'pyproject.toml').read_text()}"
        if not installed.exists() or installed.read_text() != wanted:
            words = ("--quiet", "--clear", "--python", python or sys.executable, str(self.place))
            session.run(sys.executable, "-m", "virtualenv", *words, external=True)
            self.run("python", "-m", "pip", "install", "--quiet", "--editable", f".[{extra}]", *pin.split())
            installed.write_text(wanted)

    def run(self, program: str, *arguments: str, **environ: str) -> None:
        self.session.run(str(self.place / "bin" / program), *arguments, env={**KEPT, **environ}, external=True)

    @contextmanager
    def beside(self, program: str, *arguments: str) -> Iterator[None]:
        """Runs while the block does; what it says is told after the block, and its failure is one of the session."""
        command = [str(self.place / "bin" / program), *arguments]
        self.session.log(f"beside: {' '.join(command)}")
        with tempfile.TemporaryFile() as output:
            other = subprocess.Popen(command, env={**os.environ, **KEPT}, stdout=output, stderr=output)
            try:
                yield
                other.wait()
            finally:
                if other.poll() is None:
                    other.terminate()
                other.wait()
                output.seek(0)
                self.session.log(f"beside: {' '.join(command)}\n{output.read().decode(errors='replace')}")
        if other.returncode:
            self.session.error(f"{' '.join(arguments)} failed with exit code {other.returncode}")


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Messages flow through a private server; a consumer is killed on the way; nothing is lost."""
    Environment(session, "embedded").run("python", "-m", "examples.demo", *session.posargs)


@nox.session(venv_backend="none")
def pipeline(session: nox.Session) -> None:
    """Orders flow through a Spark stream, which is killed on the way; the totals are right to the cent. Needs Java."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        session.error("Spark needs Java 17 or newer: put it on the PATH, or set JAVA_HOME")
    Environment(session, "embedded,spark").run("python", "-m", "examples.spark_pipeline", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, async pitfalls, the directions of the house, and no eight equal lines in two modules."""
    environment = Environment(session)
    environment.run("ruff", "check", *CODE)
    environment.run("ruff", "format", "--check", *CODE)
    environment.run("lint-imports")
    environment.run("pylint", "conquiet")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Both type checkers, strictly."""
    environment = Environment(session)
    with environment.beside("basedpyright", "--pythonpath", str(environment.place / "bin" / "python")):
        environment.run("mypy")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The tests, on the oldest and the newest server: four at a time with Spark's beside, of real processes fewer."""
    environment = Environment(session)
    if session.posargs:
        environment.run("python", "-m", "pytest", *session.posargs)
        return
    # One session of Spark for all of its tests, in a process of its own.
    with environment.beside("python", "-m", "pytest", "tests/spark", "-q"):
        # By stealing, each process has a part of the tests on one server: by files, it would start each one every time.
        spread = ["--numprocesses=4", "--dist=worksteal"]
        environment.run("python", "-m", "pytest", *spread, "--ignore=tests/spark", "--ignore=tests/system", "-q")
    others = [f"--ignore={file}" for file in ALONE]
    environment.run("python", "-m", "pytest", "--numprocesses=2", "--dist=worksteal", "tests/system", *others, "-q")
    environment.run("python", "-m", "pytest", *ALONE, "-q")


@nox.session(venv_backend="none")
def guarantees(session: nox.Session) -> None:
    """What leases, fences, settles, claims, repeats and retries promise, in about a minute: one server, one flavour."""
    lane(session, "guarantees")


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """What tells soon, in about two minutes: one server, one flavour, no Cluster, no PostgreSQL, no Spark."""
    lane(session, "quick")


def lane(session: nox.Session, name: str) -> None:
    """The tests of one lane, of which ``tests/rigs/lanes.py`` tells."""
    arguments = ["--numprocesses=3", "--dist=worksteal", "-q", *session.posargs]
    Environment(session).run("python", "-m", "pytest", *arguments, CONQUIET_TEST_LANE=name)


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """Every example, and every code block of README and docs/."""
    Environment(session).run("python", "-m", "pytest", "tests/documents", *session.posargs)


@nox.session(venv_backend="none")
def system(session: nox.Session) -> None:
    """Real processes, kills and restarts, and every fault at every step, at full size."""
    patterns = ("*/test_boundaries.py", "*/test_calls.py", "*/test_cancelled_*.py", "contracts/test_full_memory*.py")
    faults = [path for one in (*patterns, "contracts/test_lost_writes_*.py") for path in Path("tests").glob(one)]
    environment, limit = Environment(session), "--timeout=1200"
    if session.posargs:
        environment.run("python", "-m", "pytest", limit, *session.posargs, CONQUIET_TEST_SCALE="1")
        return
    # At full size these measure how long a call holds the server.
    alone = [*ALONE, *(f"tests/system/test_{name}.py" for name in ("balance_scale", "jobs_scale", "topics_bounded"))]
    files = ["tests/system", *map(str, sorted(faults)), *(f"--ignore={file}" for file in alone)]
    spread = ["--numprocesses=2", "--dist=worksteal"]
    environment.run("python", "-m", "pytest", limit, "-q", *spread, *files, CONQUIET_TEST_SCALE="1")
    environment.run("python", "-m", "pytest", limit, "-q", *alone, "tests/spark/test_kill.py", CONQUIET_TEST_SCALE="1")


@nox.session(venv_backend="none")
def servers(session: nox.Session) -> None:
    """Contracts, boundaries and real processes on every server that starts here, and a table of it; names pick servers.

    The table of a run on all of them goes into docs/servers.md.
    """
    alone = [f"--alone={file}" for file in ALONE]
    Environment(session).run("python", "-m", "tests.matrix", *alone, *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Speed as ratios to loops by hand and to peers, in the same run; writes docs/performance.md. Names pick suites.

    ``against REVISION`` compares the client's CPU a message with that of an older revision instead.
    """
    if session.posargs[:1] == ["against"]:
        Environment(session).run("python", "-m", "tests.bench.against", *session.posargs[1:])
        return
    environ = {"CONQUIET_PEERS": peers(session)} if not session.posargs or "jobs" in session.posargs else {}
    Environment(session).run("python", "-m", "tests.bench", *session.posargs, **environ)


def peers(session: nox.Session) -> str:
    """The Python of an environment with other libraries, which cannot live in one with this project."""
    return made(session, "env-peers", PEERS)


def made(session: nox.Session, name: str, packages: list[str]) -> str:
    """The Python of an environment with these packages alone."""
    place = HERE / ".nox" / name
    python, installed = str(place / "bin" / "python"), place / "installed-for"
    if not installed.exists() or installed.read_text() != repr(packages):
        session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(place), external=True)
        session.run(python, "-m", "pip", "install", "--quiet", *packages, external=True)
        installed.write_text(repr(packages))
    return python


@nox.session(venv_backend="none")
def audit(session: nox.Session) -> None:
    """Known holes in the packages of the development environment, where the data of pip-audit can be had."""
    libraries = next((Environment(session).place / "lib").glob("python*")) / "site-packages"
    python = made(session, "env-audit", ["pip-audit~=2.9"])
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        words = ["--path", str(libraries), "--skip-editable", "--format", "json", "--output", str(report)]
        session.run(python, "-m", "pip_audit", *words, *session.posargs, success_codes=[0, 1], external=True)
        if not report.exists():
            session.skip("the data of pip-audit cannot be reached from here")
        found = [one for one in json.loads(report.read_text())["dependencies"] if one.get("vulns")]
    if found:
        session.error(
            "\n".join(f"{one['name']} {one['version']}: {[hole['id'] for hole in one['vulns']]}" for one in found)
        )


@nox.session(venv_backend="none")
def spark_matrix(session: nox.Session) -> None:
    """The tests of Spark with other versions of PySpark and Python; names such as ``3.12 pyspark~=4.3.0`` pick some."""
    chosen = list(zip(session.posargs[::2], session.posargs[1::2], strict=True)) or MATRIX
    for python, pin in chosen:
        environment = Environment(session, "dev", python, pin)
        # Some versions leave sockets open, and a warning that is an error leaves their talk with the JVM out of step.
        environment.run("python", "-m", "pytest", "tests/spark", "--ignore=tests/spark/test_kill.py", "-Wdefault")
