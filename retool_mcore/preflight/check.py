"""Runs the checks of a run in order.

`--dry-run`, `retool plan`, `retool preflight` and the start of a run call ``check`` first.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from retool_mcore.config import RunConfig
from retool_mcore.errors import ConfigError, PlatformError, ReToolError
from retool_mcore.platforms.base import Platform
from retool_mcore.preflight import inputs, limits, machine
from retool_mcore.preflight.findings import Finding, error, missing

Check = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, kw_only=True)
class CheckScope:
    """The platform of a check, and what the check covers.

    ``is_target``: the run will use this machine. In a dry run and a plan it is False, and missing
    files, packages and devices are only notes. ``thorough``: also run the checks that only `retool
    preflight` makes: slow ones, and those of limits that are recommended but not required.
    ``data``: whether to check the data files; False before they are made.
    """

    platform: Platform
    is_target: bool = True
    thorough: bool = False
    data: bool = True


def check(config: RunConfig, scope: CheckScope, on_finding: Callable[[Finding], None] | None = None) -> list[Finding]:
    """Run all checks in order and return their findings. Calls ``on_finding`` with each at once."""
    findings: list[Finding] = []
    for name, run_check in _checks(config, scope):
        for finding in _findings(name, run_check, scope):
            findings.append(finding)
            if on_finding is not None:
                on_finding(finding)
    return findings


def require(findings: Iterable[Finding]) -> list[str]:
    """Return the texts of notes and warnings. Raises ConfigError with a line for each error."""
    listed = list(findings)
    if wrong := [finding.text for finding in listed if finding.severity == "error"]:
        raise ConfigError("\nerror: ".join(wrong))
    return [finding.text for finding in listed if finding.severity in ("note", "warning")]


def _findings(name: str, run_check: Check, scope: CheckScope) -> Iterator[Finding]:
    """The findings of one check; an error that it raises becomes a finding."""
    try:
        for finding in run_check():
            yield _resolve_missing(finding, scope)
    except PlatformError as problem:  # this machine lacks what the platform needs
        yield _resolve_missing(missing(name, str(problem)), scope)
    except ReToolError as problem:
        yield error(name, str(problem))


def _resolve_missing(finding: Finding, scope: CheckScope) -> Finding:
    if finding.severity != "missing":
        return finding
    return replace(finding, severity="error" if scope.is_target else "note")


def _checks(config: RunConfig, scope: CheckScope) -> Iterator[tuple[str, Check]]:
    yield "settings", partial(machine.settings, config, scope.platform)
    yield "stall", partial(inputs.stall, config)
    if scope.is_target:
        yield from _machine_checks(config, scope)
    yield "model", partial(inputs.model, config, fetch=scope.is_target)
    yield "tools", partial(inputs.tools, config)
    yield "reward", partial(inputs.reward, config)
    yield "tokenizer", partial(inputs.tokenizer, config)
    if scope.data:
        yield "data", partial(inputs.data, config, all_rows=scope.is_target, render=scope.thorough)
    if scope.is_target:
        yield "sandbox", partial(inputs.sandbox, config)


def _machine_checks(config: RunConfig, scope: CheckScope) -> Iterator[tuple[str, Check]]:
    yield "versions", partial(machine.versions, scope.platform, extras=scope.thorough)
    yield "devices", partial(machine.devices, config, scope.platform)
    yield "disk", partial(machine.disk, config)
    yield "host memory", partial(machine.host_memory, config)
    yield "sockets", partial(limits.sockets, config)
    if not scope.thorough:
        return
    yield "shared memory", partial(machine.shared_memory, scope.platform)
    yield "open files", partial(machine.open_files, scope.platform)
    yield "patch", partial(machine.patches, scope.platform)
    if config.cluster.nodes > 1:
        yield "network", partial(machine.network, config)
