"""Every Python block of README.md and docs/ runs as it stands, with warnings as errors.

A block that only makes sense after another one continues it: it says so with ``# continued`` on its first line.
A server at ``redis://localhost:6379`` or ``postgresql://localhost/app`` in the text means the test's own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Server
from tests.rigs.postgres import LocalPostgres

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def programs() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        program, start = "", 0
        for block in BLOCK.finditer(text):
            code = block[1]
            if program and not code.startswith("# continued"):
                yield f"{page.name}:{start}", program
                program = ""
            start = start if program else text[: block.start()].count("\n") + 1
            program += code
        if program:
            yield f"{page.name}:{start}", program


PROGRAMS = dict(programs())


def test_there_are_blocks_to_run() -> None:
    assert any(name.startswith("README.md") for name in PROGRAMS)


@pytest.fixture(scope="module")
def postgres() -> Iterator[LocalPostgres]:
    with LocalPostgres() as running:
        yield running


@pytest.mark.any_server
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", PROGRAMS)
def test_block_runs(name: str, server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "block.py"
    program = PROGRAMS[name].replace("redis://localhost:6379", server.url)
    if "postgresql://localhost/app" in program:
        program = program.replace("postgresql://localhost/app", request.getfixturevalue("postgres").dsn)
    path.write_text(program, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_of_the_readme_are_sessions_of_nox() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sessions = set(re.findall(r"nox -s (\w+)", text))
    defined = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    assert sessions
    assert sessions <= defined


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
