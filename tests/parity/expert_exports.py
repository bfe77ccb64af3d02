"""Run by test_expert_exports.py, one process a rank: what the bridge exports in each layout.

By mbridge's own gathers and by ours.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from retool_mcore.platforms import get_platform
from retool_mcore.process import die_with_parent
from tests.parity import megatron_ranks

EXPERTS = 4  # as make_model has them


def exported(engine: Any) -> dict[str, Any]:
    """Name, dtype, shape and bits of each weight in their order, and how many gathers it took."""
    import torch
    import torch.distributed as dist

    names = ("all_gather", "all_gather_into_tensor")
    gathers = {name: mock.Mock(side_effect=getattr(dist, name)) for name in names}
    with mock.patch.multiple(dist, **gathers):
        weights = [
            [name, str(weight.dtype), list(weight.shape), weight.requires_grad,
             hashlib.sha256(weight.detach().contiguous().view(torch.uint8).numpy()).hexdigest()]
            for name, weight in engine.get_per_tensor_param()[0]
        ]  # fmt: skip
    return {"weights": weights, "gathers": sum(each.call_count for each in gathers.values())}


def main(jobs_file: str, out_file: str) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    die_with_parent()
    platform = get_platform("cpu")
    platform.activate()
    dist.init_process_group("gloo")
    from retool_mcore.platforms.patches_mbridge import EXPERT_EXPORT_PATCH

    job, found = json.loads(Path(jobs_file).read_text()), {}
    for name, layout in job["layouts"].items():
        engine = megatron_ranks.Engine({"model": job["model"], "layout": layout, "dtype": "bfloat16"}).engine
        ours = exported(engine)
        EXPERT_EXPORT_PATCH.revert()
        found[name] = {"ours": ours, "mbridge": exported(engine)}
        EXPERT_EXPORT_PATCH.apply()
        parallel_state.destroy_model_parallel()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if os.environ["RANK"] == "0":
        Path(out_file).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
