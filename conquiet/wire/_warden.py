"""Run a redis-server for exactly as long as the process that asked for it lives.

::

    python -I -S _warden.py PARENT-PID SCRATCH DIRECTORY SERVER ARGUMENT...

stdin is a pipe of which the parent holds the other end, stdout gets the server's pid on a line, stderr is
the log of both. When the pipe closes, the parent is gone or a signal asks for it, the server is ended; it
may also end by itself. SCRATCH is removed in the end, and DIRECTORY is locked while the server lives.

The script stands alone and imports little, since the parent waits for it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time
from types import FrameType

TICK = 0.25
GRACE = 3.0
LOCK_WAIT = 5.0


def main(parent: int, scratch: str, directory: str, command: list[str]) -> int:
    """Guard one server; the result is its exit code, or 128 plus the signal that ended it."""
    alarm = listen()
    try:
        if not lock(directory, parent):
            sys.stderr.write(f"{directory} is in use by another server\n")
            return 1
        code = guard(spawn(command), parent, alarm)
        return code if code >= 0 else 128 - code
    finally:
        clear(scratch)


def listen() -> int:
    """Turn signals into bytes of a pipe, so that one ``select`` waits for everything."""
    alarm, wakeup = os.pipe()
    os.set_blocking(alarm, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ignore)
    # The thread that started us may have had signals blocked, and a mask is inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return alarm


def ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing: the byte in the pipe is what counts."""


def lock(directory: str, parent: int) -> bool:
    """Wait a little for a predecessor on the same data, which may still be on its way out."""
    handle = os.open(directory, os.O_RDONLY)
    # Inherited by the server: should this process be killed, the lock lasts as long as the server.
    os.set_inheritable(handle, True)
    deadline = time.monotonic() + LOCK_WAIT
    while time.monotonic() < deadline and os.getppid() == parent:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


def spawn(command: list[str]) -> int:
    """Start the server with its output in our log."""
    return os.posix_spawn(
        command[0],
        command,
        # Redis 7.2 and later refuse to start under a locale that is not installed.
        {**os.environ, "LC_ALL": "C"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, 2, 1),
        ],
    )


def guard(server: int, parent: int, alarm: int) -> int:
    """Return the code of the server once it has ended by itself, or was ended when no longer wanted."""
    report(server)
    while (code := reap(server)) is None:
        # A child that the parent forked may hold the pipe open, so its closing is not the only sign.
        if os.getppid() != parent:
            return end(server, alarm)
        ready, _, _ = select.select([0, alarm], [], [], TICK)
        if 0 in ready or (alarm in ready and asked_to_stop(alarm)):
            return end(server, alarm)
    return code


def report(server: int) -> None:
    """Tell the parent the pid; one that is gone already is noticed by the guard."""
    try:
        os.write(1, b"%d\n" % server)
    except BrokenPipeError:
        return


def asked_to_stop(alarm: int) -> bool:
    """Empty the alarm pipe; was there a signal beside the news of a child?"""
    return any(number != signal.SIGCHLD for number in os.read(alarm, 4096))


def end(server: int, alarm: int) -> int:
    """Ask the server to end, and kill it when it has not within the grace."""
    os.kill(server, signal.SIGTERM)
    # A stopped (SIGSTOP) server would not see the request.
    os.kill(server, signal.SIGCONT)
    deadline = time.monotonic() + GRACE
    while (code := reap(server)) is None:
        if time.monotonic() >= deadline:
            os.kill(server, signal.SIGKILL)
        if select.select([alarm], [], [], TICK)[0]:
            os.read(alarm, 4096)
    return code


def reap(server: int) -> int | None:
    """Return the exit code (negative: a signal's number), or ``None`` while the server runs."""
    pid, status = os.waitpid(server, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def clear(scratch: str) -> None:
    """Remove the scratch directory; what cannot be removed stays."""
    # Imported here for a faster start.
    import shutil

    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
