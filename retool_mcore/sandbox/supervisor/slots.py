"""A worker slot: the memory cgroup, uid and directory of an execution, besides its process."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.cgroup import MemoryCgroup
from retool_mcore.sandbox.supervisor.removal import move_aside, remove_directory
from retool_mcore.sandbox.supervisor.state import StateDirectory

# Entries that are deleted at once; a larger tree is deleted by a thread, so that code which leaves
# many files delays nobody else.
_MAX_ENTRIES_AT_ONCE = 100
_MAX_ENTRIES = 10_000_000  # at rlimits a survivor could make new ones for ever

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSlot:
    """One place to execute at, used by one execution (or session) at a time.

    ``uid`` is set where this process is root; ``directory`` at every level but namespaces.
    """

    uid: int | None = None
    directory: Path | None = None
    cgroup: MemoryCgroup | None = None
    cgroup_fd: int | None = None
    removals: set[asyncio.Task[bool]] = field(default_factory=set[asyncio.Task[bool]], compare=False)

    @classmethod
    def make(cls, level: Level, number: int, state: StateDirectory) -> WorkerSlot:
        """Slot ``number``.

        Raises OSError when a cgroup cannot be made, SandboxUnavailable when no uid is left.
        """
        cgroup = state.cgroups.slot(number) if state.cgroups else None
        cgroup_fd = cgroup.open() if cgroup else None
        uid = state.uids.of(number) if os.geteuid() == 0 else None
        directory = None if level == Level.NAMESPACES else state.path / f"slot{number}"
        return cls(uid=uid, directory=directory, cgroup=cgroup, cgroup_fd=cgroup_fd)

    def prepare(self, memory_limit_mb: int) -> None:
        """Set the limit, make the directory for the next execution. Raises SandboxUnavailable."""
        try:
            if self.cgroup is not None:
                self.cgroup.limit(memory_limit_mb)
        except OSError as error:
            raise SandboxUnavailable(f"the memory limit of a slot could not be set: {error}") from error
        try:
            if self.directory is not None:
                if not remove_directory(self.directory, max_entries=_MAX_ENTRIES_AT_ONCE):
                    move_aside(self.directory)  # left by a cancelled start, or withstands removal
                self.directory.mkdir(mode=0o700)
                if self.uid is not None:
                    os.chown(self.directory, self.uid, self.uid)
        except OSError as error:
            raise SandboxUnavailable(f"a slot could not be prepared: {error}") from error

    def clean(self) -> None:
        """Delete what the execution left in its directory. Never raises for what that is.

        Of many entries a thread deletes the rest (``removals``): the slot can be used meanwhile,
        and whoever waits for a result need not wait for it. ``cleaned`` waits.
        """
        if self.directory is None or remove_directory(self.directory, max_entries=_MAX_ENTRIES_AT_ONCE):
            return
        try:
            aside = move_aside(self.directory)
        except OSError as error:  # the next execution here finds out whether the slot can be used
            logger.warning("what an execution left in %s stays there: %s", self.directory, error)
            return
        work = asyncio.to_thread(remove_directory, aside, max_entries=_MAX_ENTRIES)
        self.removals.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self.removals.discard)

    async def cleaned(self) -> None:
        """Wait until all is deleted that executions left here."""
        if self.removals:
            await asyncio.wait(self.removals)

    def oom_kills(self) -> int:
        """Processes killed at this slot for memory so far; 0 without a cgroup."""
        return self.cgroup.oom_kills() if self.cgroup else 0

    def remove(self) -> None:
        """Give everything back to the kernel."""
        if self.directory is not None:
            remove_directory(self.directory)
        if self.cgroup_fd is not None:
            os.close(self.cgroup_fd)
        if self.cgroup is not None:
            self.cgroup.remove()
