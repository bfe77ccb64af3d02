"""Drives verl's TrainingWorker for the tests: one process per rank, jobs from a JSON file.

A job is one engine, {"name", "model", "platform", "layout": {"tp", "pp", "vpp", "cp", "ep", "etp"},
"dtype", "packed", "fused", "temperature", "entropy_bonus", "transformer", "optim", "reshardable",
"asynchronous", "recompute_above", "micro_batch_tokens", "adapters", "role", "actions"}, the last a
list of [name of a method of Engine, *arguments]; with a role, of RlEngine, with adapters, of
LoraEngine. ``launch`` returns what the actions of each job returned, on the rank with the output.
"""

import hashlib
import json
import os
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from retool_mcore.platforms import get_platform
from retool_mcore.platforms.network import engine_key
from retool_mcore.platforms.patches import apply_all
from retool_mcore.platforms.patches_verl import API_KEY_PATCH
from retool_mcore.process import die_with_parent
from retool_mcore.verl.checkpoint import load_checkpoint, save, start_save, weights_on_host, write_weights
from retool_mcore.verl.recompute import recompute_long_micro_batches
from tests.parity.rank_processes import by_fork, by_torchrun

GLOBAL_BATCH = 8
WHOLE_EXPERTS = {"tp": 2, "ep": 2, "etp": 1}  # a layout whose experts tensor parallelism does not cut
MICRO_BATCH_TOKENS = 96  # several packed micro-batches a step
VOCAB = 272  # 256 bytes, two special tokens, padding to a multiple of 16
STEPS = 8
LR = 1e-2


def make_model(folder: Path, kind: str = "qwen2", *, tied: bool = False, platform: str = "cpu", **more: Any) -> Path:
    """A tiny random model with a tokenizer in the Hugging Face layout, float32.

    Makes the calling process one of the platform: without `cpu`'s, transformers cannot import its
    models. ``more`` changes its shape.
    """
    get_platform(platform).activate()
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "initializer_range": 0.2,
        **more,
    }
    torch.manual_seed(0)
    hybrid = kind.startswith("qwen3_5")
    name = {
        "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mistral": "Mistral", "llama": "Llama",
        "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe",
    }[kind]  # fmt: skip
    if name.startswith("Qwen3"):
        shape["head_dim"] = 32
    if hybrid:
        shape = {
            "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 24, **shape,
        }  # fmt: skip
    if "moe" in kind:
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        shape |= {"shared_expert_intermediate_size": 32} if hybrid else {"norm_topk_prob": True}
    config = getattr(transformers, f"{name}{'Text' if hybrid else ''}Config")(**shape)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # fresh norms are all ones and biases all zeros, which would hide a mix-up
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
            elif name.endswith("A_log"):  # a fresh state forgets a token at once, which would hide a wrong state
                weight.uniform_(-4, 0)
    model.float().save_pretrained(folder, save_original_format=not hybrid)
    alphabet = ["<|endoftext|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    return folder


def batch(step: int) -> list[tuple[list[int], list[int]]]:
    """The global batch of a step: (token_ids, loss_mask); prompts and tool outputs are masked 0."""
    draw = random.Random(step)
    rows = []
    for _ in range(GLOBAL_BATCH):
        length = draw.randint(5, 40)
        ids = [draw.randrange(2, VOCAB) for _ in range(length)]
        prompt = draw.randint(1, length // 2)
        rows.append((ids, [0] * prompt + [int(draw.random() < 0.8) for _ in range(length - prompt)]))
    return rows


def worker_config(job: dict[str, Any]) -> Any:
    """verl's configuration of a job's engine."""
    from hydra.utils import get_class
    from verl.workers.config import EngineRouterReplayConfig, HFModelConfig, McoreOptimizerConfig, TrainingWorkerConfig
    from verl.workers.config.checkpoint import McoreCheckpointConfig

    platform = get_platform(job.get("platform", "cpu"))
    layout = job.get("layout", {})
    return TrainingWorkerConfig(
        model_type="value_model" if job.get("role") == "critic" else "language_model",
        model_config=HFModelConfig(
            path=job["model"],
            external_lib=platform.training.external_lib,
            use_remove_padding=job.get("packed", True),
            use_fused_kernels=job.get("fused", False),
            **job.get("adapters", {}),
        ),
        engine_config=get_class(platform.training.engine_config_class)(
            tensor_model_parallel_size=layout.get("tp", 1),
            pipeline_model_parallel_size=layout.get("pp", 1),
            virtual_pipeline_model_parallel_size=layout.get("vpp"),
            context_parallel_size=layout.get("cp", 1),
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("etp"),
            dtype=job.get("dtype", platform.training.dtypes[0]),
            dist_ckpt_optim_fully_reshardable=job.get("reshardable", False),
            distrib_optim_fully_reshardable_mem_efficient=job.get("reshardable", False),
            router_replay=EngineRouterReplayConfig(mode=job.get("router_replay", "disabled")),
            use_dynamic_bsz=True,
            max_token_len_per_gpu=job.get("micro_batch_tokens", MICRO_BATCH_TOKENS),
            infer_max_token_len_per_gpu=job.get("micro_batch_tokens", MICRO_BATCH_TOKENS),
            override_ddp_config=dict(platform.training.ddp_options),
            override_transformer_config={
                **platform.training.transformer_options,
                **job.get("transformer", {}),
            },
        ),
        optimizer_config=McoreOptimizerConfig(
            lr=job.get("lr", LR),
            min_lr=job.get("lr", LR) / 10,
            lr_decay_style="cosine",
            lr_decay_steps=STEPS,
            lr_warmup_steps=2,
            total_training_steps=STEPS,
            weight_decay=0.1,
            use_checkpoint_opt_param_scheduler=True,
            **job.get("optim", {}),
        ),
        checkpoint_config=McoreCheckpointConfig(async_save=job.get("asynchronous", False)),
    )


class Engine:
    """One rank of a TrainingWorker. Methods are the actions of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        from verl.workers.engine_workers import TrainingWorker

        from retool_mcore.verl import lora
        from retool_mcore.verl.update_worker import ExpertLoad

        self.platform = get_platform(job.get("platform", "cpu"))
        if job.get("fused") and self.platform.name == "cpu":
            from tests.parity import cuda_twin

            cuda_twin.install()
        self.job = job
        self.worker = TrainingWorker(worker_config(job))
        self.worker.set_loss_fn(partial(loss_of, bonus=job.get("entropy_bonus", 0.0)))
        lora.attach(self.worker.engine)
        self.worker.reset()
        self.engine = self.worker.engine
        if above := job.get("recompute_above"):
            recompute_long_micro_batches(self.engine.module, above, other_memory=1.0, input_share=0.1)
        config = self.engine.tf_config
        self.expert_load = ExpertLoad(self.engine.module, config) if config.num_moe_experts else None
        self.has_output = self.engine.is_mp_src_rank_with_outputs() and self.engine.get_data_parallel_rank() == 0

    def train(self, first: int, last: int) -> list[dict[str, float]] | None:
        """Of each step the loss, grad_norm, the learning rate after it, and the load of experts."""
        from verl.utils import tensordict_utils as tu

        rank, size = self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        steps = []
        for step in range(first, last + 1):
            data = as_tensordict(batch(step)[rank::size], self.job.get("temperature", 1.0))
            tu.assign_non_tensor(data, calculate_entropy="entropy_bonus" in self.job)
            output = self.worker.train_batch(data)
            load = self.expert_load.pop_metrics() if self.expert_load is not None else {}
            if self.has_output:
                metrics = tu.get(output, "metrics")
                steps.append({name: float(metrics[name]) for name in ("loss", "grad_norm", "lr")} | load)
        return steps if self.has_output else None

    def logprobs(self, sequences: list[list[int]], **options: bool) -> list[list[float]] | None:
        """Of each sequence's tokens from the second on. For layouts without data parallelism."""
        from verl.utils import tensordict_utils as tu

        data = as_tensordict([(ids, [0] + [1] * (len(ids) - 1)) for ids in sequences])
        tu.assign_non_tensor(data, compute_loss=False, **options)
        output = self.worker.infer_batch(data)
        return [row[:-1].tolist() for row in output["log_probs"].unbind()] if self.has_output else None

    def save(self, folder: str) -> None:
        save(self.engine, folder, step=0)

    def load(self, folder: str) -> None:
        self.engine.load_checkpoint(local_path=folder, del_local_after_load=False)

    def save_for_a_run(self, folder: str) -> None:
        start_save(self.engine, folder, step=0).finish()

    def resume(self, folder: str) -> None:
        """Go on from a checkpoint, which then makes room for later ones."""
        import torch.distributed as dist

        load_checkpoint(self.engine, folder)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()

    def load_other_layout(self, folder: str) -> None:
        load_checkpoint(self.engine, folder, new_seed=0)

    def export(self, folder: str) -> None:
        """The Hugging Face checkpoint of the whole model, also of an engine with adapters."""
        import torch.distributed as dist

        weights = weights_on_host(self.engine)
        if dist.get_rank() == 0:
            write_weights(self.engine, weights, folder)
        dist.barrier()

    def exports(self) -> list[Any]:
        """Of each rank, a fingerprint of each weight that it exports."""
        import torch.distributed as dist

        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [fingerprint(*each) for each in self.engine.get_per_tensor_param()[0]])
        return everyone

    def sync(self, port: int) -> None:
        """Send the weights to an SGLang server, with the adapter that a run uses."""
        import asyncio

        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from verl.workers.config import RolloutConfig
        from verl.workers.rollout.base import get_rollout_class
        from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

        apply_all((API_KEY_PATCH, *self.platform.weight_sync_patches()))
        ranks = dist.get_world_size()
        os.environ["RAY_LOCAL_WORLD_SIZE"] = str(ranks)  # Ray's workers have it
        config = RolloutConfig(name="sglang", tensor_model_parallel_size=ranks, free_cache_engine=False)
        mesh = init_device_mesh(self.platform.device.name, (1, ranks, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))
        adapter = get_rollout_class("sglang")(config, self.worker.model_config, mesh)
        if dist.get_rank() == 0:
            adapter._engine = AsyncHttpServerAdapter(
                model_path=self.worker.model_config.local_path, host="127.0.0.1", port=port, launch_server=False
            )
        weights, _ = self.engine.get_per_tensor_param()
        asyncio.run(adapter.update_weights(weights))

    def rollout_gap(self, port: int, prompts: list[list[int]]) -> dict[str, list[float]] | None:
        """Log-probabilities of sampled tokens, as SGLang reported and as Megatron computes them."""
        import httpx
        import torch.distributed as dist

        box: list[Any] = [None]
        if dist.get_rank() == 0:
            sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
            body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
            headers = {"Authorization": f"Bearer {engine_key()}"}
            url = f"http://127.0.0.1:{port}/generate"
            box[0] = httpx.post(url, json=body, headers=headers, timeout=300, trust_env=False).json()
        dist.broadcast_object_list(box)
        answers = box[0]
        rows = self.logprobs([prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)])
        if rows is None:
            return None
        return {
            "sglang": [lp for answer in answers for lp, *_ in answer["meta_info"]["output_token_logprobs"]],
            "megatron": [lp for row, prompt in zip(rows, prompts, strict=True) for lp in row[len(prompt) - 1 :]],
        }

    def draw(self) -> list[float]:
        """A number from every generator a resumed run must continue."""
        import numpy as np
        import torch
        from megatron.core import tensor_parallel

        tracker = tensor_parallel.get_cuda_rng_tracker()
        assert tracker is not None
        with tracker.fork():
            forked = torch.rand(1).item()
        return [torch.rand(1).item(), random.random(), float(np.random.rand()), forked]


def fingerprint(name: str, weight: Any) -> list[Any]:
    """A weight's name, dtype, shape and bits."""
    import torch

    bits = weight.detach().contiguous().view(torch.uint8).numpy()
    return [name, str(weight.dtype), list(weight.shape), hashlib.sha256(bits).hexdigest()]


def loss_of(model_output: Any, data: Any, dp_group: Any = None, *, bonus: float = 0.0) -> Any:
    """SFT's loss, less ``bonus`` times the mean entropy at the trained tokens."""
    import torch
    from verl.workers.utils.losses import sft_loss

    loss, metrics = sft_loss(None, model_output, data, dp_group)
    if bonus:
        mask = torch.roll(data["loss_mask"].values(), shifts=-1, dims=0)
        entropy = (model_output["entropy"].values() * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
        loss = loss - bonus * entropy
    return loss, metrics


def as_tensordict(rows: list[tuple[list[int], list[int]]], temperature: float = 1.0) -> Any:
    """What verl's TrainingWorker takes: jagged columns of token ids, positions and loss mask."""
    import torch
    from tensordict.tensorclass import NonTensorData
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    columns = {
        "input_ids": [torch.tensor(ids) for ids, _ in rows],
        "position_ids": [torch.arange(len(ids)) for ids, _ in rows],
        "loss_mask": [torch.tensor(mask) for _, mask in rows],
    }
    nested = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
    more = {"use_dynamic_bsz": True, "temperature": temperature, "global_batch_size": GLOBAL_BATCH}
    data = tu.get_tensordict(nested, {**more, "pad_mode": DatasetPadMode.NO_PADDING, "pad_token_id": 0})
    tu.assign_non_tensor(data, update_lr_scheduler=True, global_token_num=NonTensorData([len(ids) for ids, _ in rows]))
    return data


def run(job: dict[str, Any]) -> list[Any]:
    from megatron.core import parallel_state

    from tests.parity import lora_ranks, rl_ranks

    try:
        kind = lora_ranks.LoraEngine if "adapters" in job else rl_ranks.RlEngine if "role" in job else Engine
        engine = kind(job)
        return [getattr(engine, action)(*arguments) for action, *arguments in job["actions"]]
    finally:
        parallel_state.destroy_model_parallel()


def main(jobs_file: str, out_file: str) -> None:
    """One rank."""
    import torch.distributed as dist

    die_with_parent()
    jobs = json.loads(Path(jobs_file).read_text())
    platform = get_platform(jobs[0].get("platform", "cpu"))
    platform.activate()
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(platform.device.comm_backend)
    answers = [run(job) for job in jobs]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, answers)
    if dist.get_rank() == 0:
        Path(out_file).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def launch(jobs: list[dict[str, Any]], ranks: int, folder: Path, timeout_s: float = 500) -> dict[str, list[Any]]:
    """Run the jobs one after another in ``ranks`` processes. Job name -> its actions' answers."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "jobs.json", folder / "out.json"
    files[0].write_text(json.dumps(jobs))
    start = by_fork if jobs[0].get("platform", "cpu") == "cpu" else by_torchrun
    log = folder / "log"
    assert start("tests.parity.megatron_ranks", files, ranks, log, timeout_s), log.read_text()[-6000:]
    everyone = json.loads(files[1].read_text())
    return {
        job["name"]: [next((a for a in answers if a is not None), None) for answers in zip(*per_rank, strict=True)]
        for job, per_rank in zip(jobs, zip(*everyone, strict=True), strict=True)
    }


def launch_all(jobs_by_ranks: dict[int, list[dict[str, Any]]], folder: Path) -> dict[str, list[Any]]:
    """``launch`` for each number of ranks, side by side."""
    with ThreadPoolExecutor() as pool:
        launches = [pool.submit(launch, jobs, n, folder / f"ranks{n}") for n, jobs in jobs_by_ranks.items()]
        return {name: answers for launched in launches for name, answers in launched.result().items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
