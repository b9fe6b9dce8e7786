"""The users of docs/security.md, as the page has them."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.rigs.asking import ask

__all__ = ["OPTIONAL", "ROOMS", "rights_of", "user_with"]

PAGE: Final = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
ROOMS: Final = ("queue", "topics", "balanced streams", "jobs")
OPTIONAL: Final = ("+client|id", "+client|unblock")


def rights_of(room: str, **names: str) -> list[str]:
    """The rights of a room, with the names in capitals filled in."""
    [line] = re.findall(rf"^\| {room} \| `(.+)` \|$", PAGE, re.MULTILINE)
    for name, value in {"SECRET": "secret", **names}.items():
        line = line.replace(name, value)
    return str(line).split()


@asynccontextmanager
async def user_with(url: str, *rights: str, refused: str = "client") -> AsyncGenerator[str]:
    """A URL that logs in as a user with these rights; what else the server ``refused`` it is an error at the end."""
    name = f"least{secrets.token_hex(6)}"
    await ask(url, "ACL", "SETUSER", name, "reset", *rights)
    await ask(url, "ACL", "LOG", "RESET")
    place = url.rpartition("@")[2].removeprefix("redis://")
    try:
        yield f"redis://{name}:secret@{place}"
        seen = {row["object"] for row in await ask(url, "ACL LOG") if row["username"] == name}
        assert seen - {refused} <= {"client|setinfo", "client|id", "client|unblock", "client", "config", "config|get"}
    finally:
        await ask(url, "ACL", "DELUSER", name)
