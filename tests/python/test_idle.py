"""What calls that wait cost the CPU: all threads of a worker and a server, as a share of a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fserver.bench.actors import TIMEOUT_MS, ServerActor, WorkerActor
from fserver.bench.crew import Case, Crew, members

SECONDS = 1.0  # of each state
LIMIT = 0.1  # of a core; what polls takes all of one


def share(call: Callable[[], object]) -> float:
    """CPU time of this process, all its threads, by the time that the call takes."""
    start, used = time.monotonic(), time.process_time()
    call()
    return (time.process_time() - used) / (time.monotonic() - start)


class IdleWorker(WorkerActor):
    def blocked_get_batch(self) -> float:
        """While nothing is called and the server waits for a request."""
        return share(lambda: time.sleep(SECONDS))

    def blocked_wait(self) -> float:
        """Inside a wait."""
        self.sequence += 1
        request = self.requests[0][0]
        request.sent.value = self.sequence
        return share(lambda: request.node.wait(request.post(), TIMEOUT_MS))


class IdleServer(ServerActor):
    def blocked_get_batch(self) -> float:
        """Inside a get_batch."""
        return share(lambda: self.nodes[0].get_batch(timeout_ms=int(SECONDS * 1e3)))

    def blocked_wait(self) -> float:
        """While a request is left unanswered."""
        found: list[float] = []
        self.run(1, lambda *_: found.append(share(lambda: time.sleep(SECONDS))))
        return found[0]


def test_calls_that_wait_sleep() -> None:
    both = members(None, worker=IdleWorker, server=IdleServer)
    with Crew(both) as crew, crew.cluster("auto"):
        crew.all("prepare", Case("push_pull", (4096,), (4096,)))
        crew.all("verify", 1)
        nothing, get_batch = crew.all("blocked_get_batch")
        wait, answering = crew.all("blocked_wait")
    found = {"no call": nothing, "get_batch": get_batch, "wait": wait, "a request": answering}
    assert max(found.values()) < LIMIT, found


def test_the_time_of_all_threads_counts() -> None:
    def spin() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        found = share(lambda: [*pool.map(lambda _: spin(), range(2))])
    assert found * (time.monotonic() - start) >= 0.2
