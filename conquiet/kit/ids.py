"""Unique names."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time

__all__ = ["incarnation", "nonce", "process_name", "sortable", "sortables"]


def incarnation() -> str:
    """128 random bits as 32 hexadecimal digits: tells one life of a process from its next under the same name."""
    return secrets.token_hex(16)


def nonce() -> str:
    """64 random bits as 16 hexadecimal digits: tells one act from another that looks the same."""
    return secrets.token_hex(8)


def sortable() -> str:
    """32 hexadecimal digits, 80 bits of them random, that sort by the millisecond in which they were made.

    What is made together lies together in an index; nothing else may be concluded from the order.
    """
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def sortables(count: int) -> list[str]:
    """As many of :func:`sortable`, all of the same millisecond: one look at the clock and at chance for all."""
    start, chance = f"{time.time_ns() // 1_000_000:012x}", secrets.token_hex(10 * count)
    return [start + chance[at : at + 20] for at in range(0, 20 * count, 20)]


def process_name() -> str:
    """The default name of a process: its pod or host, and its process ID."""
    given = os.environ.get("POD_NAME") or socket.gethostname()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', given)[:180] or 'process'}-{os.getpid()}"
