"""Removes one change of platform `cpu` at a time and runs what the change enables.

    python -m tests.nightly.platforms.without_patches OUT_FOLDER

Writes OUT_FOLDER/result.json: target -> [outcome with the patch, outcome without]. Patches change a
whole process, so this is a program. PROBES has the probe of each change.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import socket
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from retool_mcore.errors import CheckpointError
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.patches_verl import MIN_MICRO_BATCHES
from tests.parity import host_reads, megatron_ranks
from tests.parity.host_reads import known_tokens, reads
from tests.unit.platforms import doors, test_prefills


def join_gloo() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")


class Probes:
    """Each method returns what happened; two equal answers mean that the patch changed nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = str(megatron_ranks.make_model(folder / "model"))
        self.experts = str(megatron_ranks.make_model(folder / "experts", "qwen3_moe"))
        self.hybrid = str(megatron_ranks.make_model(folder / "hybrid", "qwen3_5_text"))

    def join_group(self) -> str:
        import torch.distributed as dist
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

    def train_a_hybrid(self) -> str:
        join_gloo()
        return repr(megatron_ranks.run({"model": self.hybrid, "actions": [["train", 1, 1]]}))

    def exchange_of_tokens(self) -> str:
        import torch
        import torch.distributed as dist
        from megatron.core.transformer.moe import token_dispatcher

        join_gloo()
        sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3]), as_numpy=True, record_stream=False)
        received = torch.empty(3)
        dist.all_to_all_single(received, torch.ones(3), output_split_sizes=sizes, input_split_sizes=sizes)
        return repr(received)

    def memory_for_the_experts_of_tokens(self) -> str:
        from sglang.srt.state_capturer.base import BaseHostCache

        return repr(BaseHostCache(num_tokens=3, num_layers=2, topk_size=2, name="experts").buffer.shape)

    def tokens_of_two_ranks(self) -> str:
        """Ranks with 3 and with 1 token, as threads: all tokens on both, and back what each had."""
        import torch
        import torch.distributed as dist
        from megatron.core.tensor_parallel import mappings

        store = torch._C._distributed_c10d.HashStore()

        def of_rank(rank: int) -> list[list[float]]:
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
            gathered = mappings._gather_along_first_dim(torch.full(([3, 1][rank],), rank + 1.0), group, [3, 1])
            return [gathered.tolist(), mappings._reduce_scatter_along_first_dim(gathered, group, [3, 1]).tolist()]

        with ThreadPoolExecutor() as pool:
            return repr(list(pool.map(of_rank, range(2))))

    def rotary_embedding_of_a_context_parallel_rank(self) -> str:
        import torch
        import torch.distributed as dist
        from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

        return repr(get_pos_emb_on_this_cp_rank(torch.arange(8.0).view(8, 1), 0, dist.group.WORLD).shape)

    def weights_for_sglang(self) -> str:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from verl.workers.rollout.sglang_rollout import sglang_rollout

        update_weights: Any = vars(sglang_rollout)["sgl_update_weights"]

        class Engine:
            async def update_weights_from_tensor(self, request: Any) -> dict[str, bool]:
                self.payloads = request.serialized_named_tensors
                return {"success": True}

        join_gloo()
        engine, mesh = Engine(), init_device_mesh("cpu", (1,), mesh_dim_names=("infer_tp",))
        asyncio.run(update_weights(engine, [("weight", torch.ones(2))], "infer_tp", mesh))
        return f"{len(engine.payloads[0])} bytes"

    def results_of_two_saves(self) -> str:
        """Two roles are saved at the same time; the first asks for its results last."""
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        actor, critic = (filesystem_async.get_write_results_queue() for _ in range(2))
        actor.put("the actor's")
        critic.put("the critic's")
        return f"{critic.get_nowait()} for the critic, {actor.get_nowait()} for the actor"

    def seeds_of_requests(self) -> str:
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path=self.model, device="cpu"))

        class Batch(SimpleNamespace):
            """Can be referred to weakly."""

        requests = [
            SimpleNamespace(sampling_params=SamplingParams(sampling_seed=seed), custom_logit_processor=None)
            for seed in (7, 8)
        ]
        info = SamplingBatchInfo.from_schedule_batch(Batch(reqs=requests, device="cpu"), 4)
        return f"seeds {info.sampling_seed.tolist() if info.sampling_seed is not None else None}"

    def end_of_a_call(self) -> str:
        """Whether SGLang stops after "x > 3" or after </code>, and whether the request is freed."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        from retool_mcore.platforms.call_end import TABLE, CallEnd

        call_end = CallEnd.of({"</": 1, "code": 2, ">": 3, "x": 4}, "</code>")
        params = SamplingParams(stop_token_ids=[3], custom_params={TABLE: call_end.as_json})
        request = Req("0", "", [9], params)
        request.output_ids.extend([4, 3, 4, 1, 2, 3, 4])  # as a speculative step accepts them
        found = f"{request._check_token_based_finish(request.output_ids[:])}, {request.finished_len} tokens"
        alive = weakref.ref(request)
        gc.disable()
        del request
        freed = alive() is None
        gc.enable()
        return f"{found}, freed {freed}"

    def sums_of_weights(self) -> str:
        import torch
        from sglang.srt.utils.weight_checker import WeightChecker

        runner = SimpleNamespace(model=torch.nn.Linear(2, 2))
        checker: Any = WeightChecker(runner)
        return repr(sorted(checker.handle("retool_sums:")["sums"]))

    def text_model(self) -> str:
        """The folder of a configuration of Qwen3.5 for text."""
        from transformers import Qwen3_5TextConfig

        folder = self.folder / "qwen3_5"
        Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"]).save_pretrained(folder)
        return str(folder)

    def config_of_a_text_model(self) -> str:
        from sglang.srt.utils.hf_transformers.config import HfModelConfigParser

        return repr(type(HfModelConfigParser().parse(self.text_model(), trust_remote_code=False)))

    def server_of_a_text_model(self) -> str:
        from sglang.srt.server_args import ServerArgs

        settings: Any = ServerArgs(model_path=self.text_model(), device="cpu", disable_overlap_schedule=True)
        return f"caches states: {settings.uses_mamba_radix_cache}"

    def prefill_graphs_of_a_text_model(self) -> str:
        from sglang.srt.configs.model_config import is_piecewise_cuda_graph_disabled_model

        return f"disabled: {is_piecewise_cuda_graph_disabled_model(['Qwen3_5ForCausalLM'])}"

    def gate_of_linear_attention(self) -> str:
        import torch
        from sglang.srt.layers.attention.fla.layernorm_gated import RMSNorm

        return repr(RMSNorm(8)(torch.ones(2, 8), torch.ones(2, 8)).shape)

    def gate_of_full_attention(self) -> str:
        import torch
        from sglang.srt.layers import elementwise

        return repr(elementwise.fused_sigmoid_mul(torch.ones(2, 8), torch.ones(2, 2, 4), inplace=True).shape)

    def gate_of_a_shared_expert(self) -> str:
        import torch
        from sglang.srt.layers import elementwise

        tokens, weight, routed = torch.ones(2, 8), torch.ones(8), torch.zeros(2, 8)
        elementwise.fused_gate_sigmoid_mul_add(tokens, weight, tokens, routed)
        return f"added {routed[0, 0]:.3f}"

    def draw_by_a_seed(self) -> str:
        import torch
        from sglang.srt.layers import sampler

        logprobs_NV = torch.tensor([[0.5, 0.5]]).log()
        drawn = sampler.multinomial_with_seed(logprobs_NV, torch.tensor([7]), torch.tensor([3]))
        return f"drawn in the shape {list(drawn.shape)}"

    def copy_of_the_weights(self) -> str:
        import torch
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
        import torch
        from megatron.core.dist_checkpointing.exchange_utils import _get_empty_tensor_for_exchange

        shard = SimpleNamespace(data=torch.ones(2), init_data=lambda device: None)
        received, _ = _get_empty_tensor_for_exchange("shard", {"shard": shard}, {}, {})
        return f"received on {received.device}"

    def hooks_of_two_chunks(self) -> str:
        import torch
        from megatron.core.distributed import DistributedDataParallel
        from verl.workers.engine.megatron import transformer_impl

        config, chunks = SimpleNamespace(no_sync_func=None, grad_sync_func=None), []
        for _ in range(2):
            chunk = DistributedDataParallel.__new__(DistributedDataParallel)
            torch.nn.Module.__init__(chunk)
            chunk.config, chunk.ddp_config = config, SimpleNamespace(overlap_grad_reduce=True)
            chunks.append(chunk)
        optimizer = SimpleNamespace(config=SimpleNamespace(), scale_loss=None)
        set_hooks = transformer_impl.register_megatron_training_hooks  # pyright: ignore[reportPrivateImportUsage]  patched there
        set_hooks(chunks, optimizer)
        return repr([[each.__self__ is chunk for each, chunk in zip(found, chunks, strict=True)]
                     for found in (config.no_sync_func, config.grad_sync_func)])  # fmt: skip

    def writer_of_an_asynchronous_save(self) -> str:
        """Megatron's writer that verl gets without naming one."""
        from megatron.core.dist_checkpointing.strategies import fully_parallel, torch

        base: Any = SimpleNamespace(async_save=lambda state, folder, strategy: torch.get_async_strategy(strategy))
        strategy = fully_parallel.FullyParallelSaveStrategyWrapper(base)
        with mock.patch.object(strategy, "apply_saving_parallelization"):
            chosen: Any = strategy.async_save({}, self.folder)
        return str(chosen[0])

    def final_norm_with_sequence_parallelism(self) -> str:
        from megatron.core.transformer import TransformerConfig, transformer_block

        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm", tensor_model_parallel_size=2,
            sequence_parallel=True,
        )  # fmt: skip
        return type(transformer_block.LayerNormImpl(config=config, hidden_size=8, eps=1e-5)).__name__

    def biases_that_training_lacks_and_linear_scaling(self) -> str:
        join_gloo()
        biased = str(megatron_ranks.make_model(self.folder / "biased", "qwen3", attention_bias=True))
        try:
            megatron_ranks.run({"model": biased, "actions": []})
            biases = "ignored"
        except CheckpointError as refused:
            biases = "refused" if "self_attn.o_proj.bias" in str(refused) else repr(refused)
        rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3}
        model = str(megatron_ranks.make_model(self.folder / "scaled", rope_parameters=rope))
        return f"{biases}, {megatron_ranks.run({'model': model, 'actions': [['logprobs', [list(range(2, 42))]]]})}"

    def batched_prefills(self) -> str:
        """The number of prefills for 31 requests that come one before each step of 200 others."""
        from sglang.srt.managers.scheduler import Scheduler

        scheduling: Any = test_prefills.Scheduling(200)
        scheduling._get_new_batch_prefill_raw = lambda **_: test_prefills.sglangs_choice(scheduling)
        with mock.patch.object(test_prefills, "choose", Scheduler.get_new_batch_prefill):
            made = list(scheduling.prefills(31, every=1))
        return f"{len(made)} prefills of {sum(size for _, size in made)}"

    def micro_batches_of_a_batch(self) -> str:
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.megatron import transformer_impl

        data = megatron_ranks.as_tensordict([([7] * 10, [1] * 10)] * 4)
        tu.assign_non_tensor(data, max_token_len_per_gpu=40, **{MIN_MICRO_BATCHES: 4})
        prepare = transformer_impl.prepare_micro_batches  # pyright: ignore[reportPrivateImportUsage]  patched there
        micro_batches, _ = prepare(data=data, min_num_micro_batch=None)
        return f"{len(micro_batches)} micro-batches"

    def pack_and_unpack(self) -> str:
        from verl.models.mcore import model_forward, model_forward_fused

        def there_and_back(module) -> None:
            ids = known_tokens()
            rows, params, _ = module.preprocess_thd_engine(ids)
            module.postprocess_thd_engine(rows, params, ids, 2)

        return repr([reads(lambda each=each: there_and_back(each)) for each in (model_forward, model_forward_fused)])

    def micro_batch_on_its_way(self) -> str:
        """What verl's engines find when they move it to the device themselves."""
        from verl.workers.engine.megatron import transformer_impl

        class Seen(Exception):
            pass

        class Batch(SimpleNamespace):
            def copy(self) -> Batch:
                return Batch(sent=True)

            clear_device_ = copy

            def keys(self) -> list[str]:
                return []

            def to(self, device: object) -> None:
                raise Seen("sent ahead" if hasattr(self, "sent") else "as it was")

        found = []
        for engine in (transformer_impl.MegatronEngineWithLMHead, transformer_impl.MegatronEngineWithValueHead):
            try:
                engine.forward_step(SimpleNamespace(), iter([Batch()]), None, None, None)
            except Seen as seen:
                found.append(str(seen))
        return repr(found)


STRATEGIES = "megatron.core.dist_checkpointing.strategies."
SET_STATES = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states"
ENGINES = "verl.workers.engine.megatron.transformer_impl.MegatronEngine"
OF_HYBRIDS = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs._get_backend_spec_provider",
    *(
        f"megatron.core.ssm.gated_delta_net.{name}"
        for name in ("HAVE_FLA", "causal_conv1d", "l2norm", "chunk_gated_delta_rule")
    ),
)
CONFIGS = "sglang.srt.configs.model_config."
PROBES = {
    f"{STRATEGIES}filesystem_async.get_write_results_queue": Probes.results_of_two_saves,
    f"{STRATEGIES}fully_parallel.FullyParallelSaveStrategyWrapper.async_save": Probes.writer_of_an_asynchronous_save,
    SET_STATES: Probes.resume_from_a_reshardable_checkpoint,
    "megatron.core.dist_checkpointing.exchange_utils.torch": Probes.shard_that_another_rank_has_read,
    "torch.distributed.init_process_group": Probes.join_group,
    **doors.PROBES,
    **host_reads.PROBES,
    "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill": Probes.batched_prefills,
    "verl.workers.engine.megatron.transformer_impl.register_megatron_training_hooks": Probes.hooks_of_two_chunks,
    "verl.workers.engine.megatron.transformer_impl.prepare_micro_batches": Probes.micro_batches_of_a_batch,
    f"{ENGINES}._build_tf_config": Probes.biases_that_training_lacks_and_linear_scaling,
    f"{ENGINES}WithLMHead.forward_step": Probes.micro_batch_on_its_way,
    f"{ENGINES}WithValueHead.forward_step": Probes.micro_batch_on_its_way,
    "verl.models.mcore.model_forward.preprocess_thd_engine": Probes.pack_and_unpack,
    "verl.models.mcore.model_forward.postprocess_thd_engine": Probes.pack_and_unpack,
    "verl.models.mcore.model_forward_fused.preprocess_thd_engine": Probes.pack_and_unpack,
    "verl.models.mcore.model_forward_fused.postprocess_thd_engine": Probes.pack_and_unpack,
    "megatron.core.models.common.embeddings.rope_utils.torch": Probes.rotary_embedding_of_a_context_parallel_rank,
    **dict.fromkeys(OF_HYBRIDS, Probes.train_a_hybrid),
    "megatron.core.transformer.moe.token_dispatcher.torch": Probes.train_experts,
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": Probes.exchange_of_tokens,
    "megatron.core.tensor_parallel.mappings.torch": Probes.tokens_of_two_ranks,
    "megatron.core.transformer.transformer_block.LayerNormImpl": Probes.final_norm_with_sequence_parallelism,
    "verl.workers.rollout.sglang_rollout.sglang_rollout.sgl_update_weights": Probes.weights_for_sglang,
    "torch.Tensor.pin_memory": Probes.copy_of_the_weights,
    "sglang.srt.state_capturer.base.torch": Probes.memory_for_the_experts_of_tokens,
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": Probes.seeds_of_requests,
    "sglang.srt.utils.weight_checker.WeightChecker.handle": Probes.sums_of_weights,
    "sglang.srt.layers.sampler.multinomial_with_seed": Probes.draw_by_a_seed,
    "sglang.srt.utils.hf_transformers.config._CONFIG_REGISTRY": Probes.config_of_a_text_model,
    "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments": Probes.server_of_a_text_model,
    f"{CONFIGS}piecewise_cuda_graph_disabled_model_archs": Probes.prefill_graphs_of_a_text_model,
    "sglang.srt.layers.attention.fla.layernorm_gated.layernorm_fn": Probes.gate_of_linear_attention,
    "sglang.srt.layers.elementwise.fused_sigmoid_mul": Probes.gate_of_full_attention,
    "sglang.srt.layers.elementwise.fused_gate_sigmoid_mul_add": Probes.gate_of_a_shared_expert,
    "sglang.srt.managers.schedule_batch.Req._check_token_based_finish": Probes.end_of_a_call,
}


def outcome(probe, probes: Probes) -> str:
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
    from retool_mcore.platforms.cpu import engine
    from retool_mcore.platforms.patches import apply_all

    engine.prepare()

    apply_all(platform.patches())  # also those that processes apply when they first need them
    with_all, result = dict[object, str](), {}
    for patch in platform.patches():
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
