"""Devices as a roofline sees them.

The figures are those of data sheets; calibration.py says how much of them runs reach.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

from retool_mcore.config import RunConfig
from retool_mcore.errors import ConfigError

GIB = 2**30
DEVICES_PER_NODE = 8
NVIDIA_SMI_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, with rates per second.

    ``link`` and ``network`` count bytes out of one device, in one direction.
    """

    name: str
    platform: str
    memory_gib: float  # what a program can use
    flops: float  # dense bfloat16
    bandwidth: float  # of the device's memory, in bytes
    link: float  # to the devices of its node
    network: float  # to other nodes
    host_link: float  # to the host, in one direction
    fused: bool  # the platform's layers fuse activation and residual, and keep less for backward
    # True: rollout.engine_memory_fraction is a share of all memory and covers all that the engine
    # needs (vLLM). False: it is a share of what is free when the engine starts, and activations and
    # graphs come on top (SGLang).
    engine_counts_all: bool
    group_gib: float  # what the communication library keeps for each group of ranks, beyond measured buffers
    engine_share: float  # the most that the planner proposes for rollout.engine_memory_fraction
    decoding_fitted: bool  # decoding was measured, so the planner may change engine_tp


DEVICES = {
    device.name: device
    for device in (
        Device(
            name="h100",
            platform="cuda",
            memory_gib=79.1,
            flops=989e12,
            bandwidth=3.35e12,
            link=450e9,
            network=50e9,
            host_link=64e9,
            fused=True,
            engine_counts_all=False,
            group_gib=0.0,
            engine_share=0.9,
            decoding_fitted=True,
        ),
        Device(
            name="h200",
            platform="cuda",
            memory_gib=139.8,
            flops=989e12,
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
            host_link=64e9,
            fused=True,
            engine_counts_all=False,
            group_gib=0.0,
            engine_share=0.9,
            decoding_fitted=True,
        ),
        Device(
            name="a2",
            platform="ascend",
            memory_gib=61.0,
            flops=354e12,
            bandwidth=1.6e12,
            link=196e9,
            network=25e9,
            host_link=32e9,
            fused=False,
            engine_counts_all=True,
            group_gib=0.4,  # HCCL: two buffers of HCCL_BUFFSIZE, 200 MB unless set
            engine_share=0.75,  # verl's scripts of Megatron on NPUs have 0.5 to 0.75; measured here: none
            decoding_fitted=False,
        ),
    )
}


@dataclass(frozen=True)
class Hardware:
    """A number of equal devices, eight to a node."""

    device: Device
    count: int

    @property
    def name(self) -> str:
        return f"{self.device.name}x{self.count}"

    def link(self, ranks: int) -> float:
        """Bytes per second out of one device in a group of ``ranks`` neighbouring ranks."""
        return self.device.link if ranks <= DEVICES_PER_NODE else self.device.network


def parse(name: str) -> Hardware:
    """Parse a name: "h100x16" is sixteen H100. Raises ConfigError."""
    found = re.fullmatch(r"([a-z]\w*?)x(\d+)", name.lower())
    if found is None or found[1] not in DEVICES or int(found[2]) < 1:
        raise ConfigError(
            f"--hardware {name!r} is not a known device and a number, for example h100x16. Known: {', '.join(DEVICES)}."
        )
    return Hardware(DEVICES[found[1]], int(found[2]))


def of_run(config: RunConfig) -> Hardware:
    """The hardware at the end of a configuration's file name or run.name, else this machine's.

    For example, "rl_qwen2.5_32b_h100x16" ends in "h100x16". Raises ConfigError where none is known.
    """
    words = (config.source.rpartition("/")[2].removesuffix(".toml"), config.run.name)
    for word in words:
        try:
            hardware = parse(word.rpartition("_")[2])
        except ConfigError:
            continue
        if hardware.count == config.cluster.num_gpus and hardware.device.platform == config.run.platform:
            return hardware
    if (device := _device_here()) and device.platform == config.run.platform:
        return Hardware(device, config.cluster.num_gpus)
    raise ConfigError(
        f"{config.source}: neither its name nor run.name says which GPU to plan for, and [cluster] only "
        f"{config.cluster.num_gpus} x {config.run.platform}. Add --hardware, for example --hardware h200x8."
    )


def _device_here() -> Device | None:
    """The first GPU of this machine by nvidia-smi; None where there is none that is known here."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout.lower()
    except (OSError, subprocess.SubprocessError):
        return None
    words = told.partition("\n")[0].split()
    return next((device for name, device in DEVICES.items() if name in words), None)
