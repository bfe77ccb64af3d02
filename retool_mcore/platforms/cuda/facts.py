"""What `retool preflight` reports about NVIDIA's driver and collectives."""

import shutil
import subprocess

from retool_mcore.errors import PlatformError

BUSY_MIB = 1024  # a driver's own use stays below this


def facts() -> dict[str, str]:
    """The versions found.

    Raises PlatformError when a device is already in use: the first step would run out of memory.
    """
    import torch

    found = {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "CUDA": str(torch.version.cuda)}
    if shutil.which("nvidia-smi") is None:
        return found | {"driver": "nvidia-smi is not on the path: not known"}
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,driver_version,memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise PlatformError(f"nvidia-smi fails: {(done.stderr or done.stdout).strip()[:300]}. Look at the driver.")
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    busy = [f"{index} ({used} of {total} MiB)" for index, _, _, used, total in rows if int(used) > BUSY_MIB]
    if busy:
        raise PlatformError(
            f"another process holds memory of GPU {', '.join(busy)}. Stop it, or hide those by CUDA_VISIBLE_DEVICES."
        )
    return found | {"driver": f"{rows[0][2]}, {len(rows)} x {rows[0][1]}"}
