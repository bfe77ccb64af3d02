"""An engine of Qwen3.5 has the states and the KV cache that SGLang's own functions compute."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed")
from retool_mcore.model.shape import PUBLISHED, ModelShape
from retool_mcore.planner.generation import decode
from retool_mcore.planner.hardware import GIB, parse
from retool_mcore.planner.lengths import Lengths
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.report import refusal, report
from retool_mcore.platforms import get_platform
from tests.unit.planner.plans import rl

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
SHORT = Lengths.evenly(500, 1000)


@pytest.mark.parametrize("ratio", [0.9, 3.0])
@pytest.mark.parametrize(
    ("model", "hardware", "tp"),
    [
        ("Qwen3.5-9B", "h100x8", 1),
        ("Qwen3.5-9B", "h200x8", 8),  # more ranks than key-value heads
        ("Qwen3.5-35B-A3B", "h100x8", 2),
        ("Qwen3.5-35B-A3B", "h200x8", 1),
    ],
)
def test_a_plan_has_the_states_and_the_cache_of_sglang(
    model: str, hardware: str, tp: int, ratio: float, monkeypatch: pytest.MonkeyPatch
):
    shape, devices, fraction = PUBLISHED[model], parse(hardware), 0.75
    settings = [f"rollout.engine_memory_fraction={fraction}", f"rollout.engine_tp={tp}", "rollout.group_size=512"]
    settings += [] if ratio == 0.9 else [f"rollout.engine_args={{mamba_full_memory_ratio={ratio}}}"]
    run = rl("rl_qwen2.5_7b_h200x8", *settings, "rollout.max_running_requests=4096")
    plan = make_plan(run, shape, devices, lengths=SHORT)
    rollout = plan.rollout
    assert rollout
    free_gib = fraction * (plan.device_gib - rollout.training) - rollout.weights
    assert (rollout.state_requests, rollout.kv_tokens) == pools(shape, tp, free_gib, ratio, monkeypatch)
    assert rollout.states + rollout.kv_cache == pytest.approx(free_gib)
    decoding = decode(shape, devices, run, rollout, SHORT, training_s=0.0)
    assert (decoding.concurrency, decoding.limit) == (
        rollout.state_requests,
        "the memory for states of DeltaNet layers",
    )
    text = report(run, shape, devices, plan, [])
    assert f"per engine, DeltaNet states for {rollout.state_requests:,} running requests" in text
    assert f"DeltaNet states{rollout.states:7.1f}" in text


def test_a_plan_that_does_not_fit_does_not_advise_what_a_run_refuses():
    devices = parse("h100x8")
    plan = make_plan(rl("rl_qwen2.5_7b_h200x8", "rollout.engine_memory_fraction=0.9"), PUBLISHED["Qwen3.5-9B"], devices)
    advice = refusal(plan, devices)
    assert "rollout does not fit" in advice and "rollout.precision" not in advice


def pools(shape: ModelShape, tp: int, free_gib: float, ratio: float, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Running requests and cache tokens of an engine on CUDA that has ``free_gib`` for both."""
    get_platform("cpu").activate()
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import pool_configurator
    from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin
    from sglang.srt.server_args import ServerArgs

    from retool_mcore.platforms.sglang_models.qwen3_5_config import TextConfig

    delta, functions = shape.delta, cast(Any, ModelRunnerKVCacheMixin)
    assert delta
    types = ["linear_attention"] * delta.layers + ["full_attention"] * shape.attention_layers
    config = TextConfig(
        num_hidden_layers=shape.layers, layer_types=types, dtype=torch.bfloat16, linear_num_key_heads=delta.key_heads,
        linear_num_value_heads=delta.value_heads, linear_key_head_dim=delta.key_dim,
        linear_value_head_dim=delta.value_dim, linear_conv_kernel_dim=delta.kernel,
    )  # fmt: skip
    for module in (dp_attention, pool_configurator):
        patch.setattr(module, "get_attention_tp_size", lambda: tp)
    args: Any = ServerArgs(model_path="none", device="cpu", mamba_full_memory_ratio=ratio)
    # What ServerArgs chooses for Qwen3.5 on CUDA.
    args.mamba_radix_cache_strategy, args.disable_overlap_schedule = "extra_buffer", False
    heads = SimpleNamespace(
        get_num_kv_heads=lambda tp: max(1, shape.kv_heads // tp), head_dim=shape.head_dim, v_head_dim=shape.head_dim
    )
    runner: Any = SimpleNamespace(
        mambaish_config=config, server_args=args, spec_algorithm=SimpleNamespace(is_none=lambda: True),
        model_config=heads, kv_cache_dtype=torch.bfloat16, use_mla_backend=False,
    )  # fmt: skip
    left_gib = functions.handle_max_mamba_cache(runner, free_gib)
    token_bytes = pool_configurator.DefaultPoolConfigurator._compute_cell_size(  # pyright: ignore[reportPrivateUsage]
        runner, runner, shape.attention_layers
    )
    return args.max_mamba_cache_size // functions._calculate_mamba_ratio(runner), round(left_gib * GIB / token_bytes)
