"""Checks this machine: versions, devices, disk, memory, limits and network."""

import importlib.metadata
import os
import platform as host
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import CheckpointError, ConfigError, PlatformError
from retool_mcore.model.files import shape_of_model
from retool_mcore.planner.memory import STATE_BYTES
from retool_mcore.platforms.base import Platform
from retool_mcore.preflight.findings import Finding, error, missing, ok, warning
from retool_mcore.preflight.limits import (
    MIN_OPEN_FILES,
    address_space_problem,
    ensure_open_files,
    ensure_threads,
    folder_problem,
)
from retool_mcore.run.trackers import check_trackers
from retool_mcore.verl.private_names import SEAMS

GIB = 2**30
INTERFACE = "GLOO_SOCKET_IFNAME"  # launch/env_*.sh set it to SOCKET_IFNAME, which the user sets
PYTHON = (3, 12)
CHECKPOINT_BYTES = 14  # per parameter: bfloat16 weight for export, float32 master weight, two moments


def settings(config: RunConfig, platform: Platform) -> Iterator[Finding]:
    try:
        check_trackers(config)
    except ConfigError as problem:  # a package or a key that this machine lacks
        yield missing("settings", str(problem))
    platform.check_settings(config)
    yield ok("settings", f"{config.source} has no setting that platform {platform.name} lacks")
    for remark in platform.remarks(config):
        yield warning("settings", remark)
    if not config.saved_every:
        yield warning("settings", "this run will not save the trained weights: checkpoint.every_steps = 0 and "
                      "checkpoint.export = false. Leave out the second to save and export the last step")  # fmt: skip


def versions(platform: Platform, *, extras: bool) -> Iterator[Finding]:
    """Compare installed packages with the versions in pyproject.toml.

    ``extras``: also check the platform's extra, and the versions that the platform was tested with.
    """
    if sys.version_info[:2] != PYTHON:
        yield error("python", f"{host.python_version()} is not supported. Use 3.12: megatron-core 0.18 supports no "
                    "older and verl 0.9.1 no newer version.")  # fmt: skip
    try:
        requirements = _requirements("retool_mcore", "")
        if extras:
            own = map(Requirement, platform.tested_versions())
            requirements = [*requirements, *_requirements("retool_mcore", platform.name), *own]
    except importlib.metadata.PackageNotFoundError:
        yield warning("versions", "not checked, because this package is not installed. Run `make install`")
        return
    wrong = 0
    for requirement in requirements:
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong += 1
            yield error("versions", f"{wanted} is needed but not installed. Run `{platform.install}`.")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong += 1
            yield error("versions", f"{requirement.name} {installed} is installed, but {wanted} is needed. "
                        f"Run: pip install '{wanted}'")  # fmt: skip
    if not wrong:
        yield ok("versions", f"{len(requirements)} packages have the versions that platform {platform.name} needs")


def _requirements(package: str, extra: str) -> list[Requirement]:
    """The requirements of an extra and of the extras that it names; the base ones for ""."""
    requirements: list[Requirement] = []
    for line in importlib.metadata.requires(package) or ():
        requirement = Requirement(line)
        always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        applies = always if not extra else not always and requirement.marker.evaluate({"extra": extra})  # type: ignore[union-attr]
        if not applies:
            continue
        if requirement.name.replace("_", "-") == package.replace("_", "-"):
            for inner in requirement.extras:
                requirements += _requirements(package, inner)
        else:
            requirements.append(requirement)
    return requirements


def devices(config: RunConfig, platform: Platform) -> Iterator[Finding]:
    platform.check_machine()
    platform.check_room(config)
    count, wanted = platform.device_count(), config.cluster.gpus_per_node
    if count < wanted:
        yield error("devices", f"{count} found, but cluster.gpus_per_node = {wanted}. Lower it, or make more visible.")
    else:
        yield ok("devices", f"{count} of platform {platform.name}, {wanted} required")
    for name, value in platform.facts().items():
        yield ok(name, value)


def patches(platform: Platform) -> Iterator[Finding]:
    """Check that every patch and seam of a run supports the installed versions."""
    for record in (*platform.patches(), *platform.seams(), *SEAMS):
        try:
            record.check_version()
        except PlatformError as problem:
            yield error(record.kind, str(problem))
        else:
            yield ok(record.kind, str(record))
    if not platform.patches():
        yield ok("patch", "none on this platform")


def disk(config: RunConfig) -> Iterator[Finding]:
    if problem := folder_problem(config):
        yield error("disk", problem)
        return
    folder = config.run.dir.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_gib = shutil.disk_usage(existing).free / GIB
    params = _params(config)
    if not config.saved_every or params is None:
        yield ok("disk", f"{free_gib:.0f} GiB free under {existing}")
        return
    one_gib = CHECKPOINT_BYTES * params / GIB
    # Space for one more: a new checkpoint is written before an old one is deleted. The best one is
    # kept in addition.
    needed_gib = (config.checkpoint.keep + (2 if config.best.metric else 1)) * one_gib
    text = f"{free_gib:.0f} GiB free under {existing}; a checkpoint takes {one_gib:.1f}, the run {needed_gib:.1f} GiB"
    if free_gib < one_gib:
        yield error("disk", f"{text}. Not even one fits. Free disk space, or set run.root to another disk.")
    elif free_gib < needed_gib:
        yield warning("disk", f"{text}. Free disk space, or lower checkpoint.keep.")
    else:
        yield ok("disk", text)


def _params(config: RunConfig) -> int | None:
    """The number of parameters; None without a config.json, which ``inputs.model`` reports."""
    try:
        return shape_of_model(config.model.path).params
    except (ConfigError, CheckpointError):
        return None


def host_memory(config: RunConfig) -> Iterator[Finding]:
    """Check that a node's memory suffices for the weights and states that [memory] moves there."""
    memory = config.memory
    if not memory.offload_idle and not memory.optimizer_on_cpu:
        return
    if (params := _params(config)) is None:
        return
    nodes = config.cluster.nodes
    copies = max(1.0, config.cluster.gpus_per_node / (config.parallel.tp * config.parallel.pp))
    weights = 2 * params * copies if memory.offload_idle else 0.0
    on_host = 1.0 if memory.offload_idle else memory.optimizer_on_cpu
    needed_gib = (weights + STATE_BYTES[memory.adam_states] * params * on_host / nodes) / GIB
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    available_gib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
    text = f"{available_gib:.0f} GiB available, {needed_gib:.1f} GiB needed for weights and optimizer states"
    if available_gib < needed_gib:
        yield error(
            "host memory", f"{text}. Turn off memory.offload_idle, lower memory.optimizer_on_cpu, or free memory."
        )
    else:
        yield ok("host memory", text)


def shared_memory(platform: Platform) -> Iterator[Finding]:
    free_gib = shutil.disk_usage("/dev/shm").free / GIB
    wanted_gib = platform.host.shm_gib
    if free_gib < wanted_gib:
        yield warning("shared memory", f"{free_gib:.1f} GiB free in /dev/shm, {wanted_gib} recommended. Start the "
                      "container with --shm-size or --ipc=host")  # fmt: skip
    else:
        yield ok("shared memory", f"{free_gib:.0f} GiB free in /dev/shm")


def open_files(platform: Platform) -> Iterator[Finding]:
    """Check the shell's limits against what a run needs and what is recommended."""
    problems = {
        "open files": ensure_open_files(),
        "processes": ensure_threads(),
        "address space": address_space_problem(platform),
    }
    for name, problem in problems.items():
        if problem:
            yield error(name, problem)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = platform.host.open_files
    if MIN_OPEN_FILES <= files < wanted:
        yield warning("open files", f"{files} allowed, {wanted} recommended. Run `ulimit -n {wanted}` first")
    elif files >= wanted:
        yield ok("open files", f"{files} allowed")
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= processes < 4096 and not problems["processes"]:
        yield warning(
            "processes",
            f"{processes} allowed, 4096 recommended for Ray and the sandbox. Run `ulimit -u 4096` first",
        )


def network(config: RunConfig) -> Iterator[Finding]:
    """Warn about ports that are open to other machines; docs/security.md lists all ports."""
    if not os.environ.get(INTERFACE):
        yield warning(
            "network",
            "SOCKET_IFNAME is not set. On each node, set it to the network interface that only the run's nodes share "
            f"(without a launch script, set {INTERFACE})",
        )
    if isinstance(config, RlConfig) and os.environ.get("RAY_AUTH_MODE") == "disabled":
        yield warning(
            "network",
            "RAY_AUTH_MODE = disabled: anyone who can reach Ray's ports can run code as you. Unset it, and set the "
            "same RAY_AUTH_TOKEN_PATH on every node",
        )
