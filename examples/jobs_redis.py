"""A worker process is killed with kill -9 in the middle of a job, and another does that job; without async.

Nobody has to ask for that: the lease of a job that is not renewed runs out, and the job is claimed again under its
ID. The attempt is counted, so a job that kills every worker fails in the end. Results come back through ``wait``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from conquiet.sync import EmbeddedRedis, Job, JobQueue, JobWorker, RedisStore

DEADLY = "image-3"


def queue_of(store: RedisStore) -> JobQueue:
    # A short lease, so that nobody has to wait here.
    return JobQueue(store, "images", lease_ttl=1.0)


def shrink(job: Job) -> dict[str, int]:
    print(f"{job.worker}: {job.id}, attempt {job.attempts}", flush=True)
    if job.id == DEADLY and job.attempts == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"width": job.payload["width"] // 2}


def work(url: str, name: str) -> None:
    """What a worker process does, until SIGTERM."""
    with RedisStore.connect(url) as store:
        JobWorker(queue_of(store), shrink, concurrency=1, name=name).run()


def start(url: str, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, url, name])


def main() -> None:
    with EmbeddedRedis(appendonly=True) as server, RedisStore.connect(server.url) as store:
        images = queue_of(store)
        ids = [images.enqueue({"width": 1000 * n}, job_id=f"image-{n}") for n in range(1, 6)]
        start(server.url, "worker-1").wait()
        print("worker-1 was killed:", {str(state): count for state, count in images.counts().items()})

        other = start(server.url, "worker-2")
        for job in [images.wait(id, timeout=30) for id in ids]:
            tries = [f"{attempt.worker}: {attempt.error}" for attempt in job.failures]
            print(f"{job.id} {job.state} by {job.worker}: {job.result}, before that: {tries}")
        other.send_signal(signal.SIGTERM)  # it finishes what it does, and ends
        print(f"worker-2 ended with {other.wait()}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(sys.argv[1], sys.argv[2])
    else:
        main()
