"""SQL by name: each statement is a file in ``sql/``, with the schema and shared fragments filled in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

__all__ = ["Migration", "Statements", "migrations"]

_PLACE: Final = re.compile(r"\{(\w+)\}")
_FRAGMENTS: Final = ("claimed_columns", "columns", "moment")
_HOME: Final = "conquiet.jobs.stores.postgres"
_COMMENT: Final = re.compile(r"^\s*--.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema; ``text`` is a template."""

    version: int
    name: str
    text: str


class Statements:
    """The statements for one schema."""

    def __init__(self, schema: str) -> None:
        doubled = schema.replace('"', '""')
        self._words = {"schema": f'"{doubled}"', **{name: _text(f"{name}.sql").strip() for name in _FRAGMENTS}}
        self._known: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        """The statement in ``sql/<name>.sql``, without its comments."""
        if name not in self._known:
            self._known[name] = _COMMENT.sub("", self.fill(_text(f"{name}.sql"))).strip().encode()
        return self._known[name]

    def fill(self, text: str) -> str:
        """``text`` with its places filled in."""
        return _PLACE.sub(lambda match: self._words[match[1]], text)


@cache
def migrations() -> tuple[Migration, ...]:
    """All steps of the schema, in order."""
    found = sorted(entry.name for entry in files(_HOME).joinpath("sql", "migrations").iterdir())
    names = [name.removesuffix(".sql") for name in found if name.endswith(".sql")]
    return tuple(Migration(int(name.split("_")[0]), name, _text(f"migrations/{name}.sql")) for name in names)


def _text(path: str) -> str:
    return files(_HOME).joinpath("sql", path).read_text("utf-8")
