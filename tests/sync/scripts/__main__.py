from __future__ import annotations

import importlib
import sys

from tests.sync.scripts import watch_over

if __name__ == "__main__":
    watch_over()
    module, function, *arguments = sys.argv[1:]
    getattr(importlib.import_module(module), function)(*arguments)
