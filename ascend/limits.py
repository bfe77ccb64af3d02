"""Maps settings of a CUDA run to Ascend: the same, substituted, without effect, or refused.

The table is the only source: ``check`` enforces its refusals, ``remarks`` lists settings without
effect, ``retool plan --platform ascend`` prints it, and README.md contains it (a test compares).
"Seen in" names the source of each claim; nothing here has run on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import ConfigError

VERL, MINDSPEED, VLLM_ASCEND = "verl 0.9.1", "MindSpeed 4213c913", "vllm-ascend 0.23.0"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the mapping.

    ``is_used``: whether a run uses the setting. ``overrides``: fnmatch patterns of raw verl keys,
    or "key=value", that use it. Only rows of kind "refused" and "no effect" have either.
    """

    cuda: str
    ascend: str
    kind: Literal["same", "substituted", "no effect", "refused"]
    reason: str
    seen_in: str
    is_used: Callable[[RunConfig], bool] | None = None
    overrides: tuple[str, ...] = ()


TABLE: tuple[Row, ...] = (
    Row(
        cuda="[parallel] tp, pp, vpp, ep, etp; sequence parallelism; distributed optimizer; packed sequences",
        ascend="the same keys of verl's Megatron engine",
        kind="same",
        reason="MegatronAdaptor and MindSpeed patch Megatron-core underneath. MindSpeed's page for verl excludes vpp "
        "with mbridge, and says nothing of Megatron-Bridge",
        seen_in=f"{VERL}, {MINDSPEED}'s docs/zh/user-guide/verl.md",
    ),
    Row(
        cuda="models with experts, such as Qwen3-30B-A3B",
        ascend="the same, with a later MindSpeed than 4213c913",
        kind="same",
        reason="4213c913 refuses the grouped matrix products that Megatron-Bridge enables: a run ends when it builds "
        "the model, with MindSpeed's NotImplementedError. verl's examples for Qwen3.5-35B-A3B and GLM-5.2 train "
        "experts with later commits of MindSpeed's branch core_r0.18.0",
        seen_in=f"{MINDSPEED}, verl #7335 and #7788",
    ),
    Row(
        cuda="Qwen3.5, and models with RoPE scaling",
        ascend="",
        kind="refused",
        reason="untested on NPUs. verl's example for Qwen3.5 also installs flash-linear-attention-npu, which the image "
        "lacks. Use another model",
        seen_in="retool_mcore, verl #7335",
    ),
    Row(
        cuda="[memory] recompute, offload_idle, optimizer_on_cpu",
        ascend="the same",
        kind="same",
        reason="Megatron-core and verl implement them independently of the device; `auto` uses our patch of how verl "
        "divides a batch into micro-batches",
        seen_in=VERL,
    ),
    Row(
        cuda="GRPO, data, tool loop, ledger, sandbox, reward, checkpoints, export",
        ascend="the same",
        kind="same",
        reason="independent of the device",
        seen_in="retool_mcore",
    ),
    Row(
        cuda="lora.rank",
        ascend="",
        kind="refused",
        reason="TransformerEngineNPU's linear layers are untested with adapters. Leave it out",
        seen_in="retool_mcore",
        is_used=lambda config: config.lora.rank > 0,
    ),
    Row(
        cuda="device cuda, NCCL, Ray resource GPU",
        ascend="device npu, HCCL, Ray resource NPU",
        kind="substituted",
        reason="verl's own platform `huawei`",
        seen_in=VERL,
    ),
    Row(
        cuda="verl's Megatron engine",
        ascend="verl's MindSpeed engine, registered for (megatron, npu)",
        kind="substituted",
        reason="it patches Megatron-core again after it gets the run's context parallelism",
        seen_in=VERL,
    ),
    Row(
        cuda="Megatron-Bridge 0.5.1",
        ascend="the image's Megatron-Bridge 0.5.0 with MindSpeed-Bridge",
        kind="substituted",
        reason="Megatron-Bridge refuses MindSpeed's options in a model's configuration; MindSpeed-Bridge adds them",
        seen_in="verl 0.9.1's Dockerfile.ascend_9.1.0_a2_v0.9.1, Megatron-Bridge 0.5.0",
    ),
    Row(
        cuda="Transformer Engine's layers and fused attention",
        ascend="TransformerEngineNPU's, under the same module name",
        kind="substituted",
        reason="MindSpeed leaves both to it, and patches only Megatron's local attention; verl sets `use_flash_attn` "
        "for MindSpeed",
        seen_in=f"{MINDSPEED}, verl 0.9.1",
    ),
    Row(
        cuda="fused RMSNorm, SwiGLU and rotary embedding kernels",
        ascend="TransformerEngineNPU's RMSNorm; Megatron's plain SwiGLU and rotary embedding",
        kind="substituted",
        reason="Megatron-Bridge enables fused kernels for some families, and we switch them off. MindSpeed has NPU "
        "kernels: for its SwiGLU set bias_activation_fusion, for its rotary embedding use_fused_rotary_pos_emb in "
        "[verl_overrides]",
        seen_in=f"{MINDSPEED}, Megatron-Bridge 0.5.0",
    ),
    Row(
        cuda="[parallel] cp: ring attention of Transformer Engine",
        ascend="TransformerEngineNPU's ring, cp_comm_type p2p (in MindSpeed: megatron_cp_algo)",
        kind="substituted",
        reason="the default; it divides a sequence in the zigzag order in which verl packs it, and does not divide "
        "heads",
        seen_in=f"{MINDSPEED}, verl 0.9.1",
    ),
    Row(
        cuda="SGLang",
        ascend="vLLM with vllm-ascend, through verl's vLLM server",
        kind="substituted",
        reason="the same agent loop: the last token decides whether a turn has ended, not the engine's stop reason",
        seen_in=VERL,
    ),
    Row(
        cuda='train.mode = "async": verl\'s NCCL engine sends weights to other devices, and needs CuPy',
        ascend="verl's HCCL engine, under the same name",
        kind="substituted",
        reason="verl registers it as `nccl` if torch_npu is installed; it uses vLLM's process group",
        seen_in=VERL,
    ),
    Row(
        cuda="rollout engine releases weights and cache while the actor trains",
        ascend="vLLM's sleep at level 1: cache dropped, weights in host memory",
        kind="substituted",
        reason="verl uses level 1 if torch_npu is installed, so each engine needs host memory for a copy of the "
        "weights. verl warns that expert parallelism in the engine may reduce accuracy: check rollout_corr/kl first",
        seen_in=f"{VERL}, {VLLM_ASCEND}",
    ),
    Row(
        cuda="CUDA graphs of the rollout engine",
        ascend="ACL graphs, FULL_AND_PIECEWISE: full graphs for steps that only decode, piecewise ones for mixed steps",
        kind="substituted",
        reason="vllm-ascend's default, also in verl's scripts; piecewise graphs need torch.compile, so "
        "TORCHDYNAMO_DISABLE = 1 is refused",
        seen_in=f"{VLLM_ASCEND}'s graph_mode.md, verl 0.9.0's run_qwen3_06b_grpo_mindspeed.sh",
    ),
    Row(
        cuda="TE's FusedAdam",
        ascend="TransformerEngineNPU's FusedAdam",
        kind="substituted",
        reason="with float32 states; Megatron-core imports it under the same name",
        seen_in=MINDSPEED,
    ),
    Row(
        cuda="train.max_engine_restarts",
        ascend="a dead engine ends the run, and the same command resumes it",
        kind="no effect",
        reason="restarts are implemented only for our SGLang server",
        seen_in="retool_mcore",
        is_used=lambda config: isinstance(config, RlConfig) and config.train.max_engine_restarts > 0,
    ),
    Row(
        cuda="run.seed, and a separate seed for each request",
        ascend="run.seed seeds each engine, and requests have no seeds",
        kind="no effect",
        reason="vLLM samples seeded requests one by one, so we set no seeds, and a second run samples other text",
        seen_in="vLLM 0.23.0",
        is_used=lambda config: isinstance(config, RlConfig),
    ),
    Row(
        cuda="metrics engine/running, engine/queued and engine/restarts",
        ascend="not available; engine/cache_hit_rate is available",
        kind="no effect",
        reason="only our SGLang server provides them",
        seen_in="retool_mcore",
        is_used=lambda config: isinstance(config, RlConfig),
    ),
    Row(
        cuda='model.fp8 = "tensorwise" or "blockwise"',
        ascend="",
        kind="refused",
        reason='Atlas A2 does not support FP8. Set model.fp8 = "off"',
        seen_in=VERL,
        is_used=lambda config: config.model.fp8 != "off",
        overrides=("*.fp8", "*.fp8_*"),
    ),
    Row(
        cuda='rollout.precision = "fp8"',
        ascend="",
        kind="refused",
        reason='Atlas A2 does not support FP8. Set rollout.precision = "model"',
        seen_in=VLLM_ASCEND,
        is_used=lambda config: isinstance(config, RlConfig) and config.rollout.precision != "model",
        overrides=("*rollout.quantization*",),
    ),
    Row(
        cuda='rollout.kv_cache = "fp8"',
        ascend="",
        kind="refused",
        reason='Atlas A2 does not support FP8. Set rollout.kv_cache = "model"',
        seen_in=VLLM_ASCEND,
        is_used=lambda config: isinstance(config, RlConfig) and config.rollout.kv_cache != "model",
    ),
    Row(
        cuda='memory.adam_states = "compact" or "bfloat16"',
        ascend="",
        kind="refused",
        reason="Megatron's precision-aware optimizer is untested with TransformerEngineNPU's FusedAdam (states on the "
        "host need no FusedAdam). "
        'Set memory.adam_states = "float32", and memory.optimizer_on_cpu if memory is short',
        seen_in="Megatron-core 0.18.0",
        is_used=lambda config: config.memory.adam_states != "float32",
        overrides=("*optim.exp_avg_*", "*optim.use_precision_aware_optimizer"),
    ),
    Row(
        cuda="memory.fused_cross_entropy = true",
        ascend="",
        kind="refused",
        reason="verl's kernel is written in Triton for CUDA. Set it to false and lower train.micro_batch_tokens",
        seen_in=VERL,
        is_used=lambda config: config.memory.fused_cross_entropy,
        overrides=("*.use_fused_kernels", "*fused_kernel_options*"),
    ),
    Row(
        cuda="fused permutation of tokens for experts, which Megatron-Bridge enables",
        ascend="off; MindSpeed's kernels with moe_permute_fusion = true in [verl_overrides]",
        kind="substituted",
        reason="we have not tested them; verl's nightly test of Qwen3-30B-A3B on NPUs uses them",
        seen_in=f"{MINDSPEED}, verl's run_gspo_qwen3_30b_megatron_npu.sh of September 2026",
    ),
    Row(
        cuda='algorithm.router_replay = "R3"',
        ascend="",
        kind="refused",
        reason="vllm-ascend 0.23.0 returns the experts of each token, and verl's nightly test on NPUs replays them, "
        'but our trainer is untested with it. Use "R2" or "off"',
        seen_in=f"{VLLM_ASCEND}'s test_moe_routing_replay.py, verl's run_grpo_qwen3_30b_megatron_r3_npu.sh",
        is_used=lambda config: isinstance(config, RlConfig) and config.algorithm.router_replay == "R3",
    ),
    Row(
        cuda="[verl_overrides] ...engine_kwargs.sglang.*",
        ascend="",
        kind="refused",
        reason="the run uses vLLM. Put vLLM's options under ...engine_kwargs.vllm",
        seen_in=VERL,
        overrides=("*engine_kwargs.sglang*", "*engine_kwargs.trtllm*"),
    ),
    Row(
        cuda="[verl_overrides] CUDA graphs of training (enable_cuda_graph, external_cuda_graph, cuda_graph_*)",
        ascend="",
        kind="refused",
        reason="ACL graphs exist only for the rollout engine. Leave the key out",
        seen_in=MINDSPEED,
        overrides=("*override_transformer_config.*cuda_graph*",),
    ),
    Row(
        cuda="[verl_overrides] gradient_accumulation_fusion = true (Transformer Engine's or apex's kernels)",
        ascend="",
        kind="refused",
        reason="untested with TransformerEngineNPU, and verl's script for NPUs switches it off. Leave the key out",
        seen_in="verl's run_glm5_2_megatron.sh of September 2026",
        overrides=("*gradient_accumulation_fusion=True",),
    ),
    Row(
        cuda="[verl_overrides] context_parallel_algo other than megatron_cp_algo, cp_comm_type other than p2p",
        ascend="",
        kind="refused",
        reason="verl packs sequences in ring attention's zigzag order, which the others misread. Leave the key out",
        seen_in=f"{MINDSPEED}, verl 0.9.1",
        overrides=("*context_parallel_algo=[!m]*", "*cp_comm_type=[!p]*"),
    ),
    Row(
        cuda="[verl_overrides] global_profiler.tool = nsys",
        ascend="",
        kind="refused",
        reason='nsys supports only NVIDIA GPUs. Set global_profiler.tool = "npu"',
        seen_in=VERL,
        overrides=("global_profiler.*nsys*",),
    ),
    Row(
        cuda="retool eval, which starts its own SGLang server",
        ascend="",
        kind="refused",
        reason="its client needs SGLang's HTTP API. Validate in training ([validation]), or evaluate the export "
        "on a CUDA or CPU machine",
        seen_in="retool_mcore",
    ),
)


def check(config: RunConfig) -> None:
    """Raise one ConfigError that lists all refused settings of the run."""
    refusals: list[str] = []
    for row in (row for row in TABLE if row.kind == "refused"):
        if row.is_used is not None and row.is_used(config):
            refusals.append(f"{row.cuda}: {row.reason}")
        for key, value in config.verl_overrides.items():
            # Some patterns need the value, such as global_profiler.tool = "nsys", so match
            # "key=value", too.
            if any(fnmatchcase(key, pattern) or fnmatchcase(f"{key}={value}", pattern) for pattern in row.overrides):
                refusals.append(f"[verl_overrides] {key}: {row.reason}")
    if refusals:
        raise ConfigError(
            f'{config.source}: not supported on run.platform = "ascend": {"; ".join(dict.fromkeys(refusals))}.'
        )


def remarks(config: RunConfig) -> list[str]:
    """Warnings about settings of the run that have no effect."""
    rows = (row for row in TABLE if row.kind == "no effect" and row.is_used is not None and row.is_used(config))
    return [f'{row.cuda}: no effect on run.platform = "ascend": {row.ascend}. {_sentence(row.reason)}' for row in rows]


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}."


def markdown(rows: Sequence[Row] = TABLE) -> str:
    """The table in Markdown, for README.md."""
    lines = ["| on CUDA | on Ascend | status | why | seen in |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.cuda} | {row.ascend or '—'} | {row.kind} | {row.reason} | {row.seen_in} |")
    return "\n".join(lines) + "\n"
