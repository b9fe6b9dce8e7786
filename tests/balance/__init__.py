"""The balance room."""

from __future__ import annotations
