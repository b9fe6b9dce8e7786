"""The jobs room."""

from __future__ import annotations
