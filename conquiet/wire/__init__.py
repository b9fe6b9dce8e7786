"""The only room that talks to Redis: addresses, connections, commands and the one reply parser."""

from __future__ import annotations
