"""Ways in which a server lets nothing move, for tests that count what a client costs meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest

from tests.rigs.proxy import Proxy

__all__ = ["EACH_SECOND", "SECONDS", "TROUBLES", "Crowded", "Trouble", "costs_little", "denied", "heal", "lines"]

SECONDS: Final = 3.0
"""Of real time, in which something is counted."""
EACH_SECOND: Final = 20
"""How many commands a client that is idle or stuck may send."""
_REFUSED: Final = b"-NOPERM this user has no permissions to run this command\r\n"
_FOR_EVER: Final = 1_000_000


class Crowded(Proxy):
    """A server that takes only so many clients."""

    limit = _FOR_EVER

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.open_connections >= self.limit:
            self.accepted += 1
            writer.write(b"-ERR max number of clients reached\r\n")
            writer.close()
        else:
            await super()._accept(reader, writer)


Trouble = Callable[[Crowded], object]


def denied(command: bytes) -> Trouble:
    """The server's ACL forbids ``command``."""
    return lambda proxy: proxy.refuse(b"\r\n" + command + b"\r\n", _REFUSED, times=_FOR_EVER)


def _crowd(proxy: Crowded, limit: int) -> None:
    proxy.limit = limit


TROUBLES: Final[dict[str, Trouble]] = {
    "XREAD is denied": denied(b"XREAD"),
    "XREADGROUP is denied": denied(b"XREADGROUP"),
    "CLIENT is denied": denied(b"CLIENT"),
    "scripts are denied": denied(b"EVALSHA"),
    "too many clients": partial(_crowd, limit=1),
    "all is closed at once": Crowded.shut,
    "nothing is answered": Crowded.silence,
    "nothing happens": lambda proxy: None,
}


def heal(proxy: Crowded) -> None:
    """End every trouble but silence, which lasts as long as the connections that it met."""
    proxy.limit = _FOR_EVER
    proxy.forgive()
    proxy.reopen()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this library wrote to the log."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("conquiet")]


async def costs_little(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """Look on for some seconds: the clients of ``proxy`` ask little, open few connections and say little."""
    caplog.clear()
    before = len(proxy.received), proxy.accepted
    await asyncio.sleep(SECONDS)  # what is measured: how much happens in a time
    assert len(lines(caplog)) <= SECONDS + 1, lines(caplog)
    assert len(proxy.received) - before[0] <= EACH_SECOND * SECONDS, proxy.received[before[0] :]
    assert proxy.accepted - before[1] <= EACH_SECOND * SECONDS
