"""Pure helpers that know nothing of Redis."""

from __future__ import annotations
