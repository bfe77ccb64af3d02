"""The facts of a platform, one record for each reader."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retool_mcore.platforms.rollout_engines import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What torch, verl and Ray call the device, and how fast it is."""

    name: str  # torch's and verl's
    comm_backend: str  # of torch.distributed.init_process_group
    ray_resource: str  # the Ray resource that stands for one training process's device
    peak_flops: float | None  # dense bfloat16 flop/s of one device, for MFU; None: not known


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """How Megatron is built here; read by verl/keys."""

    dtypes: tuple[str, ...]  # what model.dtype may be, the usual one first
    engine_config_class: str  # Hydra _target_ of verl's Megatron engine configuration
    external_lib: str | None = None  # module that registers engines with verl (model.external_lib)
    transformer_options: Mapping[str, Any]  # of Megatron's TransformerConfig: kernels that this machine has
    ddp_options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of its DistributedDataParallelConfig


@dataclass(frozen=True, kw_only=True)
class RolloutFacts:
    """How the rollout engine starts and gets its weights; read by verl/keys and the evaluation."""

    engine: RolloutEngine
    free_cache_engine: bool  # it gives its memory back while the actor trains
    enforce_eager: bool  # it runs without captured graphs
    # How weights reach engines on other devices: verl's checkpoint engine, and the module that
    # registers it if verl does not.
    weight_transport: tuple[str, str | None]


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a run needs of the machine around its devices; read by preflight."""

    shm_gib: float = 16.0  # Ray's object store and the data of a weight update
    open_files: int = 65_536  # Ray's own advice for clusters
    has_devices: bool = True  # False: processes share the cores, and Ray counts made-up devices
    least_addresses_gib: int = 32  # that a process maps, used or not; not measured on devices
