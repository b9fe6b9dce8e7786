"""The processes in which a Spark runs the Python of its tasks."""

from __future__ import annotations

from contextlib import suppress

import psutil

__all__ = ["workers"]


def workers(driver: psutil.Process) -> list[psutil.Process]:
    """Those that a daemon has forked; not those that plan for the driver and end with it."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for process in driver.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                parent = process.parent()
                if parent is not None and _is_daemon(process) and _is_daemon(parent):
                    found.append(process)
    return found


def _is_daemon(process: psutil.Process) -> bool:
    return {"pyspark.daemon", "pyspark.worker"} <= set(process.cmdline())
