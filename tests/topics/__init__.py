"""The topics room."""

from __future__ import annotations
