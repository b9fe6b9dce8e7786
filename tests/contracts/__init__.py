"""One behaviour suite a subject, run on everything that promises the behaviour."""

from __future__ import annotations
