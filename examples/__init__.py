"""Short programs that run with no server installed: ``python -m examples.quickstart``."""

from __future__ import annotations
