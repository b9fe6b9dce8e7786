"""What a call makes the server do, by the server's own count."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from conquiet.balance.ledger import Ledger
from conquiet.wire.streams import pack
from tests.rigs.asking import ask

__all__ = ["MOST", "Done", "Work", "filled"]

_T = TypeVar("_T")
MOST: Final = 3000
"""Commands of one call: some milliseconds of the server's time."""
_PAGE: Final = 10_000
_FILL: Final = """
for n = ARGV[1] + 0, ARGV[2] - 1 do
  local name = 's' .. string.format('%.0f', n)
  local id = redis.call('XADD', KEYS[1], '*', 'lbs-input', cjson.encode({DataStreamName = name, Info = {n = n}}))
  redis.call('HSET', KEYS[2], name, id .. '|0|')
end
"""


async def filled(ledger: Ledger, count: int) -> None:
    """Have so many streams that nobody has had yet: ``s0`` and on."""
    keys = ledger.keys
    for start in range(0, count, _PAGE):
        words = ("EVAL", _FILL, 2, keys.input, keys.owners, start, min(start + _PAGE, count))
        await ledger.link.call(keys.input, pack(*words))


@dataclass(frozen=True)
class Done:
    """The commands of a call, those of its scripts included, and the seconds that the longest of them took."""

    commands: int
    seconds: float


class Work:
    """Counts the commands of a server that serves nobody else."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def of(self, call: Awaitable[_T]) -> tuple[Done, _T]:
        """What this one did, and what it gave."""
        await ask(self._url, "CONFIG", "RESETSTAT")
        result = await call
        found = await ask(self._url, "INFO", "commandstats")
        counted: dict[str, dict[str, Any]] = {
            name.removeprefix("cmdstat_"): about
            for name, about in found.items()
            if name.startswith("cmdstat_") and not name.startswith(_OUR_OWN)
        }
        scripts = [about["usec"] / 1e6 / about["calls"] for name, about in counted.items() if name in _CALLS]
        return Done(sum(int(about["calls"]) for about in counted.values()), max(scripts, default=0.0)), result


_CALLS: Final = ("evalsha", "eval", "xpending")
_OUR_OWN: Final = ("cmdstat_config", "cmdstat_info", "cmdstat_client", "cmdstat_hello")
