"""Maps a CUDA run's settings to an Ascend run's: each is the same, substituted, without effect or
refused.

The table is the single source: ``check`` enforces its refusals, ``remarks`` tells what has no
effect, ``retool plan --platform ascend`` prints it, and README.md holds what ``markdown`` makes of
it (a test compares). "Seen in" names the source of each claim; nothing here was run on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import ConfigError

VERL, MINDSPEED, VLLM_ASCEND = "verl 0.9.1", "MindSpeed core_r0.16.0", "vllm-ascend 0.23.0"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the mapping.

    ``asked`` tells whether a run's own settings ask for something that NPUs do not have.
    ``overrides`` are fnmatch patterns of the raw verl keys that ask for it. Only rows of kind
    "refused" and "no effect" have either.
    """

    cuda: str
    ascend: str
    kind: Literal["same", "substituted", "no effect", "refused"]
    reason: str
    seen_in: str
    asked: Callable[[RunConfig], bool] | None = None
    overrides: tuple[str, ...] = ()


TABLE: tuple[Row, ...] = (
    Row(
        cuda="[parallel] tp, pp, vpp, ep, etp; sequence parallelism; distributed optimizer; packed sequences",
        ascend="the same keys of verl's Megatron engine",
        kind="same",
        reason="MindSpeed patches Megatron-core underneath",
        seen_in=VERL,
    ),
    Row(
        cuda="[memory] recompute, offload_idle, optimizer_on_cpu",
        ascend="the same",
        kind="same",
        reason="Megatron-core's and verl's own, above the device; `auto` brings our patch of how verl cuts a batch",
        seen_in=VERL,
    ),
    Row(
        cuda="GRPO, data, tool loop, ledger, sandbox, reward, checkpoints, export",
        ascend="the same",
        kind="same",
        reason="no line of it knows the device",
        seen_in="retool_mcore",
    ),
    Row(
        cuda="lora.rank",
        ascend="",
        kind="refused",
        reason="nobody has seen MindSpeed's linear layers with adapters",
        seen_in="retool_mcore",
        asked=lambda config: config.lora.rank > 0,
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
        reason="it patches Megatron-core again once the run's context parallelism is known",
        seen_in=VERL,
    ),
    Row(
        cuda="Transformer Engine's layers and fused attention",
        ascend="MindSpeed's, `use_flash_attn = true`",
        kind="substituted",
        reason="verl's tuning guide for Ascend calls it a must; there is no Transformer Engine for NPUs",
        seen_in=MINDSPEED,
    ),
    Row(
        cuda="fused RMSNorm, SwiGLU and rotary embedding kernels",
        ascend="MindSpeed's fused RMSNorm and SwiGLU; Megatron's plain rotary embedding",
        kind="substituted",
        reason="as verl's scripts of Megatron on NPUs have them; few of those fuse the embedding, too: "
        "use_fused_rotary_pos_emb with apply_rope_fusion in [verl_overrides]",
        seen_in=f"{MINDSPEED}, verl 0.9.0's run_qwen3_235b_256k_megatron.sh",
    ),
    Row(
        cuda="[parallel] cp: ring attention of Transformer Engine",
        ascend="MindSpeed's ring, megatron_cp_algo",
        kind="substituted",
        reason="its default; it cuts the sequence in the zigzag in which verl packs it, and no heads",
        seen_in=f"{MINDSPEED}, verl 0.9.1",
    ),
    Row(
        cuda="SGLang",
        ascend="vLLM with vllm-ascend, through verl's vLLM server",
        kind="substituted",
        reason="the same agent loop: a turn's end is judged by its last token, whatever the engine calls it",
        seen_in=VERL,
    ),
    Row(
        cuda='train.mode = "async": verl\'s NCCL engine carries weights to other devices, and needs CuPy',
        ascend="verl's HCCL engine, under the same name",
        kind="substituted",
        reason="verl registers it as `nccl` where torch_npu is; it takes its process group from vLLM, which is there",
        seen_in=VERL,
    ),
    Row(
        cuda="rollout engine releases weights and cache while the actor trains",
        ascend="vLLM's sleep at level 1: cache dropped, weights in host memory",
        kind="substituted",
        reason="verl chooses level 1 where torch_npu is installed: plan a copy of the weights per engine on the host. "
        "With experts spread over an engine's devices verl says that accuracy may suffer: compare mismatch/kl first",
        seen_in=f"{VERL}, {VLLM_ASCEND}",
    ),
    Row(
        cuda="CUDA graphs of the rollout engine",
        ascend="ACL graphs, FULL_AND_PIECEWISE: whole for steps that only decode, piecewise for mixed ones",
        kind="substituted",
        reason="vllm-ascend's default and verl's scripts; piecewise goes through torch.compile, so that an exported "
        "TORCHDYNAMO_DISABLE = 1 is refused",
        seen_in=f"{VLLM_ASCEND}'s graph_mode.md, verl 0.9.0's run_qwen3_06b_grpo_mindspeed.sh",
    ),
    Row(
        cuda="TE's FusedAdam",
        ascend="Adam as MindSpeed patches it into Megatron's optimizer",
        kind="substituted",
        reason="float32 states",
        seen_in=MINDSPEED,
    ),
    Row(
        cuda="train.max_engine_restarts",
        ascend="an engine that dies ends the run, and the same command continues it",
        kind="no effect",
        reason="what watches engines and starts them again is written for our SGLang server",
        seen_in="retool_mcore",
        asked=lambda config: isinstance(config, RlConfig) and config.train.max_engine_restarts > 0,
    ),
    Row(
        cuda="run.seed, and a separate seed for each request",
        ascend="run.seed seeds each engine, and requests carry none",
        kind="no effect",
        reason="vLLM draws for seeded requests one by one; so a second run of the same settings samples other text",
        seen_in="vLLM 0.23.0",
        asked=lambda config: isinstance(config, RlConfig),
    ),
    Row(
        cuda="metrics engine/running, engine/queued and engine/restarts",
        ascend="left out; engine/cache_hit_rate is there",
        kind="no effect",
        reason="they are polled and counted in our SGLang server",
        seen_in="retool_mcore",
        asked=lambda config: isinstance(config, RlConfig),
    ),
    Row(
        cuda='model.fp8 = "tensorwise" or "blockwise"',
        ascend="",
        kind="refused",
        reason='Transformer Engine\'s recipes on Hopper tensor cores; Atlas A2 has no FP8. Set model.fp8 = "off"',
        seen_in=VERL,
        asked=lambda config: config.model.fp8 != "off",
        overrides=("*.fp8", "*.fp8_*"),
    ),
    Row(
        cuda='rollout.precision = "fp8"',
        ascend="",
        kind="refused",
        reason='SGLang\'s FP8 matrix products; Atlas A2 has no FP8. Set rollout.precision = "model"',
        seen_in=VLLM_ASCEND,
        asked=lambda config: isinstance(config, RlConfig) and config.rollout.precision != "model",
        overrides=("*rollout.quantization*",),
    ),
    Row(
        cuda='rollout.kv_cache = "fp8"',
        ascend="",
        kind="refused",
        reason='SGLang\'s cache in e4m3; Atlas A2 has no FP8. Set rollout.kv_cache = "model"',
        seen_in=VLLM_ASCEND,
        asked=lambda config: isinstance(config, RlConfig) and config.rollout.kv_cache != "model",
    ),
    Row(
        cuda='memory.adam_states = "compact" or "bfloat16"',
        ascend="",
        kind="refused",
        reason="Megatron's precision-aware optimizer needs TE's FusedAdam, unless the states are on the host. "
        'Set memory.adam_states = "float32", and memory.optimizer_on_cpu if memory is short',
        seen_in="Megatron-core 0.16.1",
        asked=lambda config: config.memory.adam_states != "float32",
        overrides=("*optim.exp_avg_*", "*optim.use_precision_aware_optimizer"),
    ),
    Row(
        cuda="memory.fused_cross_entropy = true",
        ascend="",
        kind="refused",
        reason="verl's kernel is written in Triton for CUDA. Set it to false and lower train.micro_batch_tokens",
        seen_in=VERL,
        asked=lambda config: config.memory.fused_cross_entropy,
        overrides=("*.use_fused_kernels", "*fused_kernel_options*"),
    ),
    Row(
        cuda="[verl_overrides] ...override_transformer_config.moe_permute_fusion = true",
        ascend="",
        kind="refused",
        reason="the kernels are Transformer Engine's. Leave it out",
        seen_in="Megatron-core 0.16.1",
        overrides=("*moe_permute_fusion=True",),
    ),
    Row(
        cuda='algorithm.router_replay = "R3"',
        ascend="",
        kind="refused",
        reason="vllm-ascend 0.23.0 tells the experts of a token, and verl takes them from vLLM 0.22 on; that "
        'MindSpeed\'s router replays them has been seen nowhere. Use "R2", or "off"',
        seen_in=f"{VLLM_ASCEND}'s test_moe_routing_replay.py, {VERL}",
        asked=lambda config: isinstance(config, RlConfig) and config.algorithm.router_replay == "R3",
    ),
    Row(
        cuda="[verl_overrides] ...engine_kwargs.sglang.*",
        ascend="",
        kind="refused",
        reason="there is no SGLang in this run. vLLM's options go under ...engine_kwargs.vllm",
        seen_in=VERL,
        overrides=("*engine_kwargs.sglang*", "*engine_kwargs.trtllm*"),
    ),
    Row(
        cuda="[verl_overrides] CUDA graphs of training (enable_cuda_graph, external_cuda_graph, cuda_graph_*)",
        ascend="",
        kind="refused",
        reason="ACL graphs exist for the rollout engine only. Leave the key out",
        seen_in=MINDSPEED,
        overrides=("*override_transformer_config.*cuda_graph*",),
    ),
    Row(
        cuda="[verl_overrides] gradient_accumulation_fusion, attention_backend (apex's and cuDNN's kernels)",
        ascend="",
        kind="refused",
        reason="neither apex nor cuDNN exists for NPUs. Leave the key out",
        seen_in=MINDSPEED,
        overrides=("*gradient_accumulation_fusion", "*.attention_backend"),
    ),
    Row(
        cuda="[verl_overrides] context_parallel_algo other than megatron_cp_algo (Ulysses and its hybrids)",
        ascend="",
        kind="refused",
        reason="verl packs a sequence in the ring's zigzag, which they would read as whole pieces. Leave the key out",
        seen_in=f"{MINDSPEED}, verl 0.9.1",
        overrides=("*context_parallel_algo=[!m]*",),
    ),
    Row(
        cuda="[verl_overrides] global_profiler.tool = nsys",
        ascend="",
        kind="refused",
        reason='NVIDIA\'s profiler. verl has global_profiler.tool = "npu"',
        seen_in=VERL,
        overrides=("global_profiler.*nsys*",),
    ),
    Row(
        cuda="retool eval, which starts its own SGLang server",
        ascend="",
        kind="refused",
        reason="its client speaks SGLang's HTTP. Validate in training ([validation]), or evaluate the export "
        "on a CUDA or CPU machine",
        seen_in="retool_mcore",
    ),
)


def check(config: RunConfig) -> None:
    """Raise one ConfigError that names every setting without a counterpart on an NPU."""
    found: list[str] = []
    for row in (row for row in TABLE if row.kind == "refused"):
        if row.asked is not None and row.asked(config):
            found.append(f"{row.cuda}: {row.reason}")
        for key, value in config.verl_overrides.items():
            # Some values name the tool ("global_profiler.tool" = "nsys"), so match the key with its
            # value too.
            if any(fnmatchcase(key, pattern) or fnmatchcase(f"{key}={value}", pattern) for pattern in row.overrides):
                found.append(f"[verl_overrides] {key}: {row.reason}")
    if found:
        raise ConfigError(f'{config.source}: not on run.platform = "ascend": {"; ".join(dict.fromkeys(found))}.')


def remarks(config: RunConfig) -> list[str]:
    """What a run's settings ask for and do not get, though the run works."""
    rows = (row for row in TABLE if row.kind == "no effect" and row.asked is not None and row.asked(config))
    return [f'{row.cuda}: no effect on run.platform = "ascend": {row.ascend}. {_sentence(row.reason)}' for row in rows]


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}."


def markdown(rows: Sequence[Row] = TABLE) -> str:
    """The table as it stands in README.md."""
    lines = ["| on CUDA | on Ascend | | why | seen in |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.cuda} | {row.ascend or '—'} | {row.kind} | {row.reason} | {row.seen_in} |")
    return "\n".join(lines) + "\n"
