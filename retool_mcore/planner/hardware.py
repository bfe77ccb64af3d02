"""Roofline models of devices, with data-sheet figures.

calibration.py has the achieved fractions of these figures.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass, replace

from retool_mcore.config import RunConfig
from retool_mcore.errors import ConfigError

GIB = 2**30
DEVICES_PER_NODE = 8
NVIDIA_SMI_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. Rates are per second.

    ``link`` and ``network``: bytes sent by one device, in one direction.
    """

    name: str
    platform: str
    memory_gib: float  # usable by a program
    flops: float  # dense bfloat16 FLOP/s
    bandwidth: float  # device memory, bytes/s
    link: float  # to devices of the same node
    network: float  # to other nodes
    host_link: float  # to the host, in one direction
    fused: bool  # layers fuse activation and residual, which saves activation memory
    # True (vLLM): rollout.engine_memory_fraction is a share of the total memory and covers the
    # whole engine. False (SGLang): it is a share of the memory that is free when the engine starts,
    # and excludes activations and graphs.
    engine_counts_all: bool
    group_gib: float  # communication library memory per process group, beyond the measured buffers
    engine_share: float  # largest rollout.engine_memory_fraction that the planner proposes
    decoding_fitted: bool  # decoding is calibrated on this device, so the planner may change engine_tp


H100 = Device(
    name="h100", platform="cuda", memory_gib=79.1, flops=989e12, bandwidth=3.35e12, link=450e9, network=50e9,
    host_link=64e9, fused=True, engine_counts_all=False, group_gib=0.0, engine_share=0.9, decoding_fitted=True,
)  # fmt: skip
H200 = replace(H100, name="h200", memory_gib=139.8, bandwidth=4.8e12)
A2 = Device(
    name="a2", platform="ascend", memory_gib=61.0, flops=354e12, bandwidth=1.6e12, link=196e9, network=25e9,
    host_link=32e9, fused=False, engine_counts_all=True, decoding_fitted=False,
    group_gib=0.4,  # HCCL: two buffers of HCCL_BUFFSIZE, 200 MB unless set
    engine_share=0.75,  # verl's Megatron scripts for NPUs use 0.5 to 0.75; not measured here
)  # fmt: skip
DEVICES = {device.name: device for device in (H100, H200, A2)}


@dataclass(frozen=True)
class Hardware:
    """A number of identical devices, eight per node."""

    device: Device
    count: int

    @property
    def name(self) -> str:
        return f"{self.device.name}x{self.count}"

    def link(self, ranks: int) -> float:
        """Bytes per second that one device sends within a group of ``ranks`` consecutive ranks."""
        return self.device.link if ranks <= DEVICES_PER_NODE else self.device.network


def parse(name: str) -> Hardware:
    """Parse a hardware name: "h100x16" means sixteen H100 GPUs. Raises ConfigError."""
    match = re.fullmatch(r"([a-z]\w*?)x(\d+)", name.lower())
    if match is None or match[1] not in DEVICES or int(match[2]) < 1:
        raise ConfigError(
            f"Unknown --hardware {name!r}. Write a device and a number, for example h100x16. Known devices: "
            f"{', '.join(DEVICES)}."
        )
    return Hardware(DEVICES[match[1]], int(match[2]))


def hardware_of_run(config: RunConfig) -> Hardware:
    """The hardware of a run: GPUs like this machine's, if they are known and the run has one node.

    Otherwise, the suffix of the file name or of run.name: "rl_qwen2.5_32b_h100x16" means "h100x16".
    Raises ConfigError if neither gives known hardware.
    """
    platform, count = config.run.platform, config.cluster.num_gpus
    here = _device_here() if platform == "cuda" and config.cluster.nodes == 1 else None
    if here is not None:
        return Hardware(here, count)
    for word in (config.source.rpartition("/")[2].removesuffix(".toml"), config.run.name):
        try:
            hardware = parse(word.rpartition("_")[2])
        except ConfigError:
            continue
        if hardware.count == count and hardware.device.platform == platform:
            return hardware
    raise ConfigError(
        f"{config.source}: neither the file's name nor run.name contains the GPU to plan for, and [cluster] only has "
        f"{count} x {platform}. Add --hardware, for example --hardware h200x8."
    )


def _device_here() -> Device | None:
    """The model of this machine's first GPU, from nvidia-smi; None if absent or unknown."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        output = subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout.lower()
    except (OSError, subprocess.SubprocessError):
        return None
    words = output.partition("\n")[0].split()
    return next((device for name, device in DEVICES.items() if name in words), None)
