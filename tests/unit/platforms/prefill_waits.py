"""SGLang's scheduler as far as it decides between a prefill and a decoding step."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


class Scheduling:
    """``decoding`` requests decode and never end; others wait, and prefills take them all.

    ``slots``: the most that decode. ``own``: attributes of SGLang's scheduler that differ.
    """

    def __init__(self, decoding: int, waiting: int = 0, *, slots: int = 512, **own: Any) -> None:
        self.running_batch = SimpleNamespace(reqs=[Request() for _ in range(decoding)], is_prefill_only=False)
        self.waiting_queue = [Request() for _ in range(waiting)]
        self.slots = slots
        self.chunked_req = self.prefill_delayer = None
        self.__dict__ |= own

    def get_num_allocatable_reqs(self, running: int) -> int:
        return self.slots - running

    def _get_new_batch_prefill_raw(self, prefill_delayer_single_pass: Any = None) -> list[Any] | None:
        """SGLang's own choice."""
        del prefill_delayer_single_pass
        free = self.get_num_allocatable_reqs(len(self.running_batch.reqs))
        batch, self.waiting_queue = self.waiting_queue[:free], self.waiting_queue[free:]
        self.running_batch.reqs += batch
        return batch or None

    def prefills(self, choose: Any, steps: int, *, every: int) -> Iterator[tuple[int, int]]:
        """(step, requests) of each prefill. A request comes before every ``every``-th step."""
        for step in range(steps):
            if step % every == 0:
                self.waiting_queue.append(Request())
            while batch := choose(self):
                yield step, len(batch)


class Request:
    def __init__(self, over: bool = False) -> None:
        self.over = over

    def finished(self) -> bool:
        return self.over


def batches() -> str:
    """How many prefills 30 requests need that come one before each step of 200 others."""
    from sglang.srt.managers.scheduler import Scheduler

    made = list(Scheduling(200).prefills(Scheduler.get_new_batch_prefill, 31, every=1))
    return f"{len(made)} prefills of {sum(size for _, size in made)}"


ENABLES = {"sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill": lambda probes: batches()}
