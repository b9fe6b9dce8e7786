"""Names that nobody else has."""

from __future__ import annotations

import secrets

__all__ = ["incarnation"]


def incarnation() -> str:
    """128 random bits as 32 hexadecimal digits: tells one life of a process from its next under the same name."""
    return secrets.token_hex(16)
