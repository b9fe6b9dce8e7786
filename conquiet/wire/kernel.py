"""What the kernel and the lowest layer know of a connection, and the event loop's stream does not know yet."""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import struct
import termios
from typing import Final

__all__ = ["KernelView"]

_NUMBER: Final = struct.Struct("i")


class KernelView:
    """The socket under an open connection; without one that can be asked, there is never anything to tell."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._transport = writer.transport
        # TLS passes all on at once to the transport beneath, where it waits; a foreign loop may not show that one.
        beneath = getattr(getattr(self._transport, "_ssl_protocol", None), "_transport", None)
        self._lowest: asyncio.WriteTransport = beneath or self._transport
        self._socket: socket.socket | None = self._transport.get_extra_info("socket")
        self._poll = None
        is_secure = self._transport.get_extra_info("ssl_object") is not None
        # What comes over TLS need not be a reply.
        if self._socket is not None and not is_secure and hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(self._socket.fileno(), select.POLLIN)

    @property
    def peer(self) -> object:
        """Where the other side is: a host may have several addresses, each with a server of its own."""
        return self._transport.get_extra_info("peername")

    def has_news(self) -> bool:
        """Whether something has arrived, the end of the connection included, that no turn of the loop has taken in."""
        return self._poll is not None and bool(self._poll.poll(0))

    def unsent(self) -> int:
        """How many bytes were written and have not reached the other side, as far as that can be told."""
        waiting = self._lowest.get_write_buffer_size()
        if self._lowest is not self._transport and not self._transport.is_closing():
            waiting += self._transport.get_write_buffer_size()
        if self._socket is None:
            return waiting
        try:
            [sending] = _NUMBER.unpack(fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(_NUMBER.size)))
        except (OSError, ValueError):  # no socket that counts, or closed
            return waiting
        return waiting + int(sending)

    def abort(self) -> None:
        """End the connection at once: what has not left never will."""
        self._transport.abort()
        self._lowest.abort()
