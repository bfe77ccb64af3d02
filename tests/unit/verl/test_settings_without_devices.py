"""Settings whose effect shows on GPUs only, followed to the call that has it.

Otherwise the golden trees would be their only witness, and a golden tree says that a key was set.
"""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.verl.loss_scenario import actor_config, tree

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def engine_of(*settings: str) -> Any:
    """verl's Megatron engine of the actor, as far as it is before its model is built."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    engine = object.__new__(MegatronEngine)
    engine.engine_config = actor_config(*settings).megatron
    engine._is_offload_param = engine.engine_config.param_offload
    engine._is_offload_optimizer = engine.engine_config.optimizer_offload
    return engine


EIGHT = "cluster.gpus_per_node=8"


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ((EIGHT, "parallel.pp=4", "parallel.vpp=3"), (1, 4, 3, 1, 1, None)),
        ((EIGHT, "parallel.tp=4", "parallel.cp=2"), (4, 1, None, 2, 1, None)),
        ((EIGHT, "parallel.tp=2", "parallel.ep=8", "parallel.etp=1"), (2, 1, None, 1, 8, 1)),
    ],
    ids=["interleaved", "tp and cp", "experts"],
)
def test_megatrons_groups_are_made_for_the_run_files_layout(
    settings: tuple[str, ...], layout: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
):
    from megatron.core import parallel_state

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: False)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **words: asked.append(words))
    engine_of(*settings)._init_device_mesh()
    names = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = (f"{name}_parallel_size" for name in names)
    assert tuple(asked[0][name] for name in sizes) == layout


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_idle_actor_leaves_the_device_where_the_run_file_says(
    offload: bool, mode: str, monkeypatch: pytest.MonkeyPatch
):
    """After an update its weights and Adam's states go, after a pass its weights."""
    from verl.workers.engine.base import BaseEngineCtx
    from verl.workers.engine.megatron import transformer_impl

    engine = engine_of(f"memory.offload_idle={str(offload).lower()}")
    engine.module, engine.optimizer, moved = "weights", "states", []
    for name in ("load_megatron_model_to_gpu", "load_megatron_optimizer"):
        monkeypatch.setattr(transformer_impl, name, lambda what, **_: moved.append(f"{what} in"))
    for name in ("offload_megatron_model_to_cpu", "offload_megatron_optimizer"):
        monkeypatch.setattr(transformer_impl, name, lambda what: moved.append(f"{what} out"))
    for module in ("verl.workers.engine.base", "verl.workers.engine.megatron.transformer_impl"):
        monkeypatch.setattr(f"{module}.get_device_name", lambda: "cuda")
    context = BaseEngineCtx(engine, mode=mode)
    context.__enter__()
    context.__exit__(None, None, None)
    states = ["states"] if mode == "train" else []
    whole = [f"{what} {way}" for way in ("in", "out") for what in ["weights", *states]]
    assert moved == (whole if offload else [])


@pytest.mark.parametrize(
    ("layers", "again"),
    [("2", [0, 1]), ("5", [0, 1, 2, 3, 4]), ("full", [*range(6)])],
    ids=["two", "five", "all"],
)
def test_so_many_layers_are_recomputed_as_the_run_file_says(
    layers: str, again: list[int], monkeypatch: pytest.MonkeyPatch
):
    """In Megatron's own block of six layers: which of them it runs within a checkpoint."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.transformer_block import TransformerBlock

    options = engine_of(f"memory.recompute={layers}").engine_config.override_transformer_config
    plain = {"fp8": None, "fp4": None, "distribute_saved_activations": False}
    inside: list[bool] = [False]
    recomputed, kept = [], []

    def layer(index: int) -> Any:
        def run(hidden_states: torch.Tensor, context: Any, **_: Any) -> tuple[torch.Tensor, Any]:
            recomputed.extend([index] if inside[0] else [])
            return hidden_states, context

        return run

    def checkpoint(function: Any, _: bool, *inputs: Any) -> Any:
        kept.append(inputs[0])
        inside[0] = True
        found = function(*inputs)
        inside[0] = False
        return found

    monkeypatch.setattr(tensor_parallel, "checkpoint", checkpoint)
    block = SimpleNamespace(config=SimpleNamespace(**{**plain, **options}), num_layers_per_pipeline_rank=6,
                            _get_layer=layer)  # fmt: skip
    words = ("attention_mask", "context", "context_mask", "rotary_pos_emb", "attention_bias", "packed_seq_params")
    TransformerBlock._checkpointed_forward(
        block, hidden_states=torch.zeros(1), use_inner_quantization_context=False, **dict.fromkeys(words)
    )
    assert recomputed == again and len(kept) == len(again), "one input is kept for each"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engine_takes_the_memory_the_requests_and_the_numbers_that_the_run_file_gives_it(
    dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """To what SGLang itself is started with."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout import replica

    replica._load_sglang()
    from verl.workers.rollout.sglang_rollout import async_sglang_server as module

    class Started(Exception):
        pass

    @dataclass(init=False)  # verl asks which fields SGLang's has
    class Arguments:
        def __init__(self, **words: Any) -> None:
            raise Started(words)

    settings = ("rollout.engine_memory_fraction=0.37", "rollout.max_running_requests=24", "rollout.engine_tp=2")
    settings += (f"model.dtype={dtype}",)
    config = omega_conf_to_dataclass(tree("cluster.gpus_per_node=2", *settings).actor_rollout_ref.rollout)
    monkeypatch.setattr(module, "ServerArgs", Arguments)
    model = SimpleNamespace(local_path="m", trust_remote_code=False, hf_config=None, lora_rank=0)
    server = SimpleNamespace(
        config=config, model_config=model, nnodes=1, node_rank=0, base_gpu_id=0, lora_as_adapter=False,
        rollout_mode=None, _disaggregation_role="null",
    )  # fmt: skip
    with pytest.raises(Started) as started:
        asyncio.run(module.SGLangHttpServer.launch_server(server))
    words = started.value.args[0]
    assert (words["mem_fraction_static"], words["max_running_requests"], words["tp_size"]) == (0.37, 24, 2)
    assert words["dtype"] == dtype
