"""The project's commands: ``nox`` checks everything, ``nox -s demo`` shows it at work."""

from __future__ import annotations

import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests", "examples"]

HERE = Path(__file__).parent
CODE = ["conquiet", "tests", "examples", "noxfile.py"]


class Environment:
    """A virtual environment that sessions share, so that a fresh machine installs things once."""

    def __init__(self, session: nox.Session, extra: str = "dev") -> None:
        self.session = session
        self.place = HERE / ".nox" / f"env-{extra}"
        installed = self.place / "installed-for"
        wanted = f"{sys.version}\n{(HERE / 'pyproject.toml').read_text()}"
        if not installed.exists() or installed.read_text() != wanted:
            session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(self.place), external=True)
            self.run("python", "-m", "pip", "install", "--quiet", "--editable", f".[{extra}]")
            installed.write_text(wanted)

    def run(self, program: str, *arguments: str, **environ: str) -> None:
        self.session.run(str(self.place / "bin" / program), *arguments, env=environ, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Messages flow through a private Redis; a consumer is killed on the way; nothing is lost."""
    Environment(session, "embedded").run("python", "-m", "examples.demo", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, async pitfalls, and the directions of the house."""
    environment = Environment(session)
    environment.run("ruff", "check", *CODE)
    environment.run("ruff", "format", "--check", *CODE)
    environment.run("lint-imports")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Both type checkers, strictly."""
    environment = Environment(session)
    environment.run("mypy")
    environment.run("basedpyright", "--pythonpath", str(environment.place / "bin" / "python"))


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The tests, on every server that this machine has: three files at a time, and those of real processes alone."""
    environment = Environment(session)
    if session.posargs:
        environment.run("python", "-m", "pytest", *session.posargs)
        return
    apart = ["--ignore=tests/documents", "--ignore=tests/system"]
    environment.run("python", "-m", "pytest", "--numprocesses=3", "--dist=loadfile", *apart)
    environment.run("python", "-m", "pytest", "tests/system")


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """Every example, and every code block of README and docs/."""
    Environment(session).run("python", "-m", "pytest", "tests/documents", *session.posargs)


@nox.session(venv_backend="none")
def system(session: nox.Session) -> None:
    """Real processes, kills and restarts, at full size."""
    arguments = ["tests/system", "tests/topics/test_boundaries.py", "--timeout=1200", *session.posargs]
    Environment(session).run("python", "-m", "pytest", *arguments, CONQUIET_TEST_SCALE="1")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Speed as ratios to hand-written loops in the same run; writes docs/performance.md. Names pick suites."""
    Environment(session).run("python", "-m", "tests.bench", *session.posargs)
