"""Removes one change of the patches of training at a time and runs what the change enables.

    python -m tests.nightly.platforms.without_patches OUT_FOLDER

Writes OUT_FOLDER/result.json: target -> [outcome with the patch, outcome without]. Patches change a
whole process, so this is a program. PROBES has the probe of each change.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from retool_mcore.errors import CheckpointError
from retool_mcore.platforms import get_platform, patches_verl
from retool_mcore.platforms.patches_mbridge import EXPERT_EXPORT_PATCH
from retool_mcore.platforms.patches_megatron import WRITER_PATCH
from retool_mcore.platforms.patches_torch import STORE_PATCH
from tests.parity import megatron_ranks

# Patches of which `make test` shows the effect, and that only save time, or that engines need.
SHOWN_IN_MAKE_TEST = (
    *get_platform("cpu").sglang_patches(),
    *get_platform("cpu").weight_sync_patches(),
    patches_verl.PACKING_PATCH,
    patches_verl.MICRO_BATCH_PATCH,
    patches_verl.CHUNK_PATCH,
    patches_verl.API_KEY_PATCH,
    patches_verl.MASTER_PORT_PATCH,
    EXPERT_EXPORT_PATCH,
    WRITER_PATCH,
    STORE_PATCH,
)
# Changes that only several ranks or the asynchronous trainer need, which run in `make test`.
OF_OTHER_RUNS = {
    "torch.Tensor.pin_memory",
    "megatron.core.dist_checkpointing.exchange_utils.torch",
    "megatron.core.models.common.embeddings.rope_utils.torch",
    "megatron.core.tensor_parallel.mappings.torch",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
}


def join_gloo() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


class Probes:
    """Each method returns what happened; two equal answers mean that the patch changed nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = str(megatron_ranks.make_model(folder / "model"))
        self.experts = str(megatron_ranks.make_model(folder / "experts", "qwen3_moe"))

    def join_group(self) -> str:
        from verl.utils.distributed import initialize_global_process_group_ray

        initialize_global_process_group_ray()
        dist.destroy_process_group()
        return "joined and left"

    def train_and_resume(self) -> str:
        """Build, train, save, load, train, with the generators' numbers in between."""
        checkpoint = self.folder / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        join_gloo()
        actions = [["train", 1, 1], ["draw"], ["save", str(checkpoint)], ["load", str(checkpoint)], ["draw"]]
        return repr(megatron_ranks.run({"model": self.model, "actions": [*actions, ["train", 2, 2], ["draw"]]}))

    def train_experts(self) -> str:
        join_gloo()
        return repr(megatron_ranks.run({"model": self.experts, "actions": [["train", 1, 1]]}))

    def log_probabilities_beyond_the_original_context(self) -> str:
        join_gloo()
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e3}
        model = str(megatron_ranks.make_model(self.folder / "yarn", rope_parameters=rope))
        return repr(megatron_ranks.run({"model": model, "actions": [["logprobs", [list(range(2, 42))]]]}))

    def head_of_a_tied_llama(self) -> str:
        """The name that the output layer of its last pipeline stage is read by."""
        from mbridge.models.llama import LLaMABridge

        bridge: Any = LLaMABridge.__new__(LLaMABridge)
        bridge.hf_config = SimpleNamespace(tie_word_embeddings=True)
        bridge._adjust_mapping_for_shared_weights()
        return repr(bridge._weight_name_mapping_mcore_to_hf("output_layer.weight"))

    def load_a_model_with_more_biases(self) -> str:
        join_gloo()
        model = str(megatron_ranks.make_model(self.folder / "biased", "llama", attention_bias=True))
        try:
            megatron_ranks.run({"model": model, "actions": []})
        except CheckpointError as refused:
            return "refused" if "self_attn.o_proj.bias" in str(refused) else repr(refused)
        return "loaded"


PROBES = {
    "torch.distributed.init_process_group": Probes.join_group,
    "mbridge.core.llm_bridge.LLMBridge._model_provider": Probes.log_probabilities_beyond_the_original_context,
    "mbridge.models.llama.LLaMABridge._adjust_mapping_for_shared_weights": Probes.head_of_a_tied_llama,
    "mbridge.core.bridge.Bridge.load_weights": Probes.load_a_model_with_more_biases,
    "megatron.core.transformer.moe.token_dispatcher.torch": Probes.train_experts,
    "megatron.core.transformer.moe.router.router_gating_linear": Probes.train_experts,
}


def outcome(probe: Any, probes: Probes) -> str:
    try:
        return probe(probes)
    except Exception as error:  # noqa: BLE001  any failure is an outcome
        return f"{type(error).__name__}: {error}"


def main(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    platform = get_platform("cpu")
    platform.activate()
    probes = Probes(folder)
    import retool_mcore.platforms.cpu.engine  # noqa: F401  the patches of training processes
    from retool_mcore.platforms.patches import apply_all

    apply_all(platform.patches())  # also those that processes apply when they first need them
    with_all, result = dict[object, str](), {}
    for patch in platform.patches():
        if patch in SHOWN_IN_MAKE_TEST:
            continue
        for target in (change.target for change in patch.changes if change.target not in OF_OTHER_RUNS):
            probe = PROBES.get(target, Probes.train_and_resume)
            if probe not in with_all:
                with_all[probe] = outcome(probe, probes)
            patch.revert(target)
            without = outcome(probe, probes)
            patch.apply()
            result[target] = [with_all[probe], without]
    (folder / "result.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
