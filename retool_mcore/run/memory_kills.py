"""Whether the kernel has killed processes of this node's job for want of memory.

A process that is killed so says nothing, and whoever waited for it sees only that it died.
"""

import re
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
V1, V2 = "memory.oom_control", "memory.events"  # both have a line "oom_kill N"
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """Counts from its making on, in the memory cgroup that this process is in."""

    def __init__(self) -> None:
        self._file = _counter()
        self._before = self._counted()

    def words(self) -> str:
        """What a user should know; "" where no process was killed, or the kernel does not tell."""
        if not (killed := self._counted() - self._before):
            return ""
        return (
            f"The kernel has killed {killed} of this job's processes for want of memory ({self._file}). Give the job "
            "or its container more memory, or less to do at a time."
        )

    def _counted(self) -> int:
        try:
            found = _COUNT.search(self._file.read_text(encoding="ascii")) if self._file else None
        except OSError:
            return 0
        return int(found[1]) if found else 0


def _counter() -> Path | None:
    """A container without a namespace of cgroups has no path of its group, but has "/"."""
    candidates: list[Path] = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            candidates += [CGROUPS / "memory" / where / V1 for where in (group.lstrip("/"), "")]
        elif not controllers:
            candidates += [CGROUPS / where / V2 for where in (group.lstrip("/"), "")]
    return next((path for path in candidates if path.is_file()), None)
