"""The synchronous facade: parity with the core, and what threads, signals, forks and pickles do to it."""

from __future__ import annotations
