"""The one lease: who owns something, in which epoch, and until when at least.

The scripts compare owner and epoch. The holder here also stops by its own clock before the lease can have run out
on the server, so that a holder that was cut off does not go on while another begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script

__all__ = ["Lease", "renewal_timeout"]

_RENEW: Final = Script.named("lease_renew")
_MARGIN: Final = 0.1
_PATIENCE: Final = 1 / 6
"""The part of a lease's time for which a renewal is waited for. A renewal is begun after a third of that time: it, and
a second one over a new connection, then have failed before three quarters of it have passed."""
_LEAST_PATIENCE: Final = 0.1


def renewal_timeout(ttl: float) -> float:
    """Seconds for which the answer to a renewal of leases of ``ttl`` seconds is worth waiting for."""
    return max(ttl * _PATIENCE, _LEAST_PATIENCE)


@dataclass(slots=True)
class Lease:
    """A lease that was held when it was last heard of.

    ``deadline`` is the local time until when no other owner can have taken it; ``lost`` is final. Both are written
    by the heartbeat, on another thread, and only read elsewhere.
    """

    key: str
    owner: str
    epoch: int
    ttl: float
    deadline: float
    lost: bool = False

    @classmethod
    def acquired(cls, key: str, owner: str, epoch: int, ttl: float, asked: float) -> Lease:
        """What a successful acquisition that was asked for at local time ``asked`` gives."""
        return cls(key, owner, epoch, ttl, asked + ttl * (1 - _MARGIN))

    def is_safe(self, now: float) -> bool:
        """Whether no other can own it at local time ``now``."""
        return now < self.deadline and not self.lost

    def renewal(self, offset_ms: int) -> Call:
        """The call that prolongs it."""
        return _RENEW([self.key], self.owner, self.epoch, round(self.ttl * 1000), offset_ms)

    def renewed(self, reply: Reply, asked: float) -> None:
        """Take note of the answer to a renewal that was sent at ``asked``; an error tells nothing of the lease."""
        if reply == 1:
            self.deadline = max(self.deadline, asked + self.ttl * (1 - _MARGIN))
        elif not isinstance(reply, Exception):
            self.lost = True
