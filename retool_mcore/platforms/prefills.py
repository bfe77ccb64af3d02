"""Requests that come one by one while others decode are prefilled together.

SGLang prefills whatever waits before each decoding step. Trajectories end their turns at different
times. So nearly every step of 500 responses waited for a prefill of a few tokens, launched kernel
by kernel: 22 ms with a 0.5B model, where the step itself takes 10 ms.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement

FEW = 4  # those that could enter are few while they are less than a 4th of those that decode
MOST_STEPS = 16  # for which the first of them waits; far below the steps of a turn
WAITED = "_retool_steps_waited"


def prefill_together(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """No prefill for up to MOST_STEPS decoding steps, while few wait and others decode.

    It counts requests and steps, no seconds: so all ranks of an engine decide alike.
    """

    @wraps(original)
    def get_new_batch_prefill(self: Any) -> Any:
        waited = getattr(self, WAITED, 0)
        if waited < MOST_STEPS and _can_wait(self):
            setattr(self, WAITED, waited + 1)
            return None
        setattr(self, WAITED, 0)
        return original(self)

    return get_new_batch_prefill


def _can_wait(scheduler: Any) -> bool:
    running = scheduler.running_batch
    decoding = len(running.reqs)
    # In a full engine many wait, and as few enter as have left it.
    enter = min(len(scheduler.waiting_queue), scheduler.get_num_allocatable_reqs(decoding))
    return (
        0 < enter * FEW < decoding
        and scheduler.chunked_req is None  # half a prompt is in the cache
        and scheduler.prefill_delayer is None  # SGLang's own, where a user asks for it
        and not running.is_prefill_only
        and not all(request.finished() for request in running.reqs)  # else no step would follow
    )


PREFILL_PATCH = Patch(
    target="sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
    replace=prefill_together,
    reason="each decoding step waits for a prefill of the few requests that came during the last one; SGLang's "
    "prefill delayer also holds back a full engine's last requests, for as long as all others run",
    applies_to=requirement("sglang"),
    remove_when="SGLang's prefill delayer can wait by its queue alone and counts steps instead of milliseconds",
)
