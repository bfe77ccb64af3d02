"""verl's client of the rollout engines, which waits for an engine that is being restarted.

A request that an engine took with it, or that finds none, is sent again. Nothing of it has reached
the trajectory, so no token is lost or counted twice. verl/engines.py restarts the engine, or ends
the run.
"""

from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential_jitter
from verl.workers.rollout.llm_server import LLMServerClient

from retool_mcore.rollout.engine import EngineUnavailable

# The longest wait of a request. In mode "partial_rollout" it may begin before a step's update,
# after which the engine is restarted.
ENGINE_AWAY_S = 3600.0
PAUSE_S = (0.2, 5.0)  # between two attempts: at first, at most


class EngineClient(LLMServerClient):
    """See the module."""

    away_s = ENGINE_AWAY_S

    async def generate(self, request_id: Any, **request: Any) -> Any:
        """verl's, again until an engine answers. Raises what verl's raises after ``away_s``."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(is_away),
            stop=stop_after_delay(self.away_s),
            wait=wait_exponential_jitter(multiplier=PAUSE_S[0], max=PAUSE_S[1]),
            reraise=True,
        )
        return await retrying(super().generate, request_id, **request)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        """verl's. Raises EngineUnavailable when the router has died, which nothing restarts."""
        try:
            return await super()._acquire_server(request_id, **extra)
        except RayActorError as error:
            raise EngineUnavailable(f"the engines' router died: {str(error)[-500:]}") from error


def is_away(error: BaseException) -> bool:
    """Whether ``error`` says that the engine died, or, from the router, that there is none now."""
    none_now = isinstance(error, RayTaskError) and isinstance(error.cause, EngineUnavailable)
    return none_now or isinstance(error, RayActorError)
