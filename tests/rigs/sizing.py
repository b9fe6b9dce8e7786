"""How large the long tests are: a tenth as a rule, all of it in the session at full size."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["IS_FULL", "SCALE"]

SCALE: Final = float(os.environ.get("CONQUIET_TEST_SCALE", "0.1"))
"""Which part of the full size they run at."""
IS_FULL: Final = SCALE >= 1
"""Whether every fault is tried at every step, in every way, on every server; else a sample of them."""
