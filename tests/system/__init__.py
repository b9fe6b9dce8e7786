"""Real processes, kills and restarts."""

from __future__ import annotations
