"""Whether a server's executions work: an answer to a ping says only that its loop turns."""

import asyncio

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest
from retool_mcore.sandbox.supervisor.local import LocalSandbox

_FAILURES_IN_A_ROW = 3
_PROBE_TIMEOUT_S = 5.0


class Health:
    """Counts the sandbox's own failures in a row; what the code does is no failure."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox = sandbox
        self._failures = 0
        self._reason = ""
        self._probing = asyncio.Lock()

    def worked(self) -> None:
        """An execution came to its end."""
        self._failures = 0

    def failed(self, error: SandboxUnavailable) -> None:
        """An execution could not be had."""
        self._failures += 1
        self._reason = str(error)

    async def report(self) -> tuple[int, dict[str, object]]:
        """The HTTP status, 200 or 503, and the body of GET /health.

        Once calls fail, nobody may send any more: so it is tried here whether they still do.
        """
        if self._failures >= _FAILURES_IN_A_ROW:
            async with self._probing:
                await self._probe()
        well = self._failures < _FAILURES_IN_A_ROW
        body: dict[str, object] = {
            "status": "ok" if well else "failing",
            "level": str(self._sandbox.level),
            "workers": self._sandbox.workers,
            "zygote_deaths": self._sandbox.num_zygote_deaths,
        }
        return (200, body) if well else (503, body | {"reason": self._reason[:500]})

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await self._sandbox.run(ExecRequest(code="", run_timeout_s=_PROBE_TIMEOUT_S))
        except SandboxUnavailable as error:
            self.failed(error)
        except TimeoutError:
            self._reason = f"an empty execution did not end within {_PROBE_TIMEOUT_S:.0f} s"
        else:
            self.worked()
