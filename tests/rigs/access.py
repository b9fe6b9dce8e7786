"""A user of the server whose rights a test takes away and gives back: what it may not do, the server itself refuses."""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Final, Self

from redis.exceptions import ResponseError

from tests.rigs.asking import ask

__all__ = ["DENIALS", "User"]

_ALL: Final = ("allkeys", "allchannels", "+@all")
DENIALS: Final[dict[str, tuple[str, ...]]] = {
    "XREAD": ("-xread",),
    "CLIENT": ("-client",),
    "CONFIG": ("-config",),
    "scripts": ("-evalsha", "-eval"),
    "the keys": ("resetkeys", "~nothing"),
    "everything": ("-@all",),
}
"""Rights by the name of what is denied, as rules of ``ACL SETUSER``."""


class User:
    """A user with all rights, until :meth:`deny`; ``url`` logs in as it."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.name = f"u{secrets.token_hex(6)}"
        self.url = server.replace("//", f"//{self.name}:secret@")

    async def __aenter__(self) -> Self:
        await ask(self._server, "ACL", "SETUSER", self.name, "reset", "on", ">secret", *_ALL)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await ask(self._server, "ACL", "DELUSER", self.name)

    async def deny(self, what: str) -> None:
        """Take away rights, and close the user's connections: whatever waits has to begin anew."""
        await ask(self._server, "ACL", "SETUSER", self.name, *DENIALS[what])
        try:
            await ask(self._server, "CLIENT", "KILL", "USER", self.name)
        except ResponseError:  # it had none
            return

    async def allow(self) -> None:
        """Give all rights back."""
        await ask(self._server, "ACL", "SETUSER", self.name, *_ALL)
