"""``check``: every check of a run that needs no device, in order.

`--dry-run`, `retool plan`, `retool preflight` and the start of a run call it once, before anything
else.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from retool_mcore.config import RunConfig
from retool_mcore.errors import PlatformError, ReToolError
from retool_mcore.platforms.base import Platform
from retool_mcore.preflight import inputs, limits, machine
from retool_mcore.preflight.findings import Finding, error, missing

Check = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a check is made on.

    ``runs``: the run is for this machine. False for a dry run and a plan: then files, packages and
    devices that are not here are notes. ``thorough``: preflight's checks, which take longer than a
    start should, and look at what is wanted but not needed. ``data``: False before the data files
    are made.
    """

    platform: Platform
    runs: bool = True
    thorough: bool = False
    data: bool = True


def check(config: RunConfig, here: Machine, tell: Callable[[Finding], None] | None = None) -> list[Finding]:
    """Every finding, in order; ``tell`` gets each as it comes."""
    found: list[Finding] = []
    for name, look in _checks(config, here):
        for finding in _judged(name, look, here):
            found.append(finding)
            if tell is not None:
                tell(finding)
    return found


def _judged(name: str, look: Check, here: Machine) -> Iterator[Finding]:
    try:
        for finding in look():
            yield _judge(finding, here)
    except PlatformError as problem:  # this machine lacks what the platform needs
        yield _judge(missing(name, str(problem)), here)
    except ReToolError as problem:
        yield error(name, str(problem))


def _judge(finding: Finding, here: Machine) -> Finding:
    if finding.severity != "missing":
        return finding
    return replace(finding, severity="error" if here.runs else "note")


def _checks(config: RunConfig, here: Machine) -> Iterator[tuple[str, Check]]:
    yield "settings", partial(machine.settings, config, here.platform)
    yield "stall", partial(inputs.stall, config)
    if here.runs:
        yield from _machine_checks(config, here)
    yield "model", partial(inputs.model, config, fetch=here.runs)
    yield "tools", partial(inputs.tools, config)
    yield "reward", partial(inputs.reward, config)
    yield "tokenizer", partial(inputs.tokenizer, config)
    if here.data:
        yield "data", partial(inputs.data, config, all_rows=here.runs, render=here.thorough)
    if here.runs:
        yield "sandbox", partial(inputs.sandbox, config)


def _machine_checks(config: RunConfig, here: Machine) -> Iterator[tuple[str, Check]]:
    yield "versions", partial(machine.versions, here.platform, extras=here.thorough)
    yield "devices", partial(machine.devices, config, here.platform)
    yield "disk", partial(machine.disk, config)
    yield "host memory", partial(machine.host_memory, config)
    yield "sockets", partial(limits.sockets, config)
    if not here.thorough:
        return
    yield "shared memory", partial(machine.shared_memory, here.platform)
    yield "open files", partial(machine.open_files, here.platform)
    yield "patch", partial(machine.patches, here.platform)
    if config.cluster.nodes > 1:
        yield "network", partial(machine.network, config)
