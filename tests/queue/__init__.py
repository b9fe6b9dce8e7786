"""The queue against bad input, failing servers and real databases."""

from __future__ import annotations
