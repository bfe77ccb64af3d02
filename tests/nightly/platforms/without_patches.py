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
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
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

    def exchange_of_tokens(self) -> str:
        from megatron.core.transformer.moe import token_dispatcher

        join_gloo()
        sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3]), as_numpy=True, record_stream=False)
        received = torch.empty(3)
        dist.all_to_all_single(received, torch.ones(3), output_split_sizes=sizes, input_split_sizes=sizes)
        return repr(received)

    def tokens_of_two_ranks(self) -> str:
        """Ranks with 3 and with 1 token, as threads: all tokens on both, and back what each had."""
        from megatron.core.tensor_parallel import mappings

        store = torch._C._distributed_c10d.HashStore()

        def of_rank(rank: int) -> list[list[float]]:
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
            gathered = mappings._gather_along_first_dim(torch.full(([3, 1][rank],), rank + 1.0), group, [3, 1])
            return [gathered.tolist(), mappings._reduce_scatter_along_first_dim(gathered, group, [3, 1]).tolist()]

        with ThreadPoolExecutor() as pool:
            return repr(list(pool.map(of_rank, range(2))))

    def rotary_embedding_of_a_context_parallel_rank(self) -> str:
        from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

        return repr(get_pos_emb_on_this_cp_rank(torch.arange(8.0).view(8, 1), 0, dist.group.WORLD).shape)

    def copy_of_the_weights(self) -> str:
        from verl.utils.megatron_utils import copy_megatron_model_to_cpu

        [copy] = copy_megatron_model_to_cpu([torch.nn.Linear(2, 2)]).values()
        return f"{sorted(copy['model_state'])} copied"

    def resume_from_a_reshardable_checkpoint(self) -> str:
        checkpoint = self.folder / "reshardable"
        shutil.rmtree(checkpoint, ignore_errors=True)
        join_gloo()
        actions = [["train", 1, 1], ["save", str(checkpoint)], ["load", str(checkpoint)], ["train", 2, 3]]
        return repr(megatron_ranks.run({"model": self.model, "reshardable": True, "actions": actions}))

    def shard_that_another_rank_has_read(self) -> str:
        from megatron.core.dist_checkpointing.exchange_utils import _get_empty_tensor_for_exchange

        shard = SimpleNamespace(data=torch.ones(2), init_data=lambda device: None)
        received, _ = _get_empty_tensor_for_exchange("shard", {"shard": shard}, {}, {})
        return f"received on {received.device}"

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


SET_STATES = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states"
PROBES = {
    SET_STATES: Probes.resume_from_a_reshardable_checkpoint,
    "megatron.core.dist_checkpointing.exchange_utils.torch": Probes.shard_that_another_rank_has_read,
    "torch.distributed.init_process_group": Probes.join_group,
    "mbridge.core.llm_bridge.LLMBridge._model_provider": Probes.log_probabilities_beyond_the_original_context,
    "mbridge.models.llama.LLaMABridge._adjust_mapping_for_shared_weights": Probes.head_of_a_tied_llama,
    "mbridge.core.bridge.Bridge.load_weights": Probes.load_a_model_with_more_biases,
    "megatron.core.models.common.embeddings.rope_utils.torch": Probes.rotary_embedding_of_a_context_parallel_rank,
    "megatron.core.transformer.moe.token_dispatcher.torch": Probes.train_experts,
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": Probes.exchange_of_tokens,
    "megatron.core.tensor_parallel.mappings.torch": Probes.tokens_of_two_ranks,
    "megatron.core.transformer.moe.router.router_gating_linear": Probes.train_experts,
    "torch.Tensor.pin_memory": Probes.copy_of_the_weights,
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
        for target in (change.target for change in patch.changes):
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
