"""Settings followed to the part of Megatron, verl or SGLang that has their effect, each on a CPU.

Kernels of a GPU do the rest for three of them: tests/nightly/numerics/test_gpu_parity.py and
test_gpu_experts.py compare what comes out.
"""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.ppo import ppo_tree
from tests.unit.verl.loss_scenario import actor_config, tree

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

MEGATRON = "actor_rollout_ref.actor.megatron."
MINDSPEED = f"{MEGATRON}override_transformer_config.use_flash_attn"


class Reached(Exception):
    """Its one argument is what the last call before the part was given."""


@pytest.mark.parametrize("fused", [True, False])
def test_the_fused_forward_pass_is_in_the_actors_model_where_the_run_file_says(
    fused: bool, monkeypatch: pytest.MonkeyPatch
):
    """What it computes: tests/unit/numerics/test_fused_log_probs.py. Its kernels need a GPU."""
    from verl.models.mcore import model_forward_fused
    from verl.workers import engine_workers
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    settings = tree(f"memory.fused_cross_entropy={str(fused).lower()}").actor_rollout_ref
    model = {name: settings.model[name] for name in ("use_fused_kernels", "use_remove_padding")}

    def new(**words: Any) -> Any:
        raise Reached(words["engine_config"])

    monkeypatch.setattr(EngineRegistry, "new", new)
    monkeypatch.setattr("verl.workers.engine_workers.Worker.__init__", lambda self: None)
    monkeypatch.setattr(engine_workers.TrainingWorker, "rank", 0, raising=False)
    for name in ("initialize_global_process_group_ray", "set_numa_affinity"):
        monkeypatch.setattr(engine_workers, name, lambda **_: None)
    actor = actor_config()
    config = SimpleNamespace(
        model_config=Model(model), engine_config=actor.engine, optimizer_config=actor.optim, checkpoint_config=None,
        profiler_config=None, model_type="language_model",
    )  # fmt: skip
    with pytest.raises(Reached) as reached:
        engine_workers.TrainingWorker(config)
    patched: list[str] = []
    monkeypatch.setattr(model_forward_fused, "patch_fused_forward", patched.append)
    engine = object.__new__(MegatronEngine)
    engine.engine_config, engine.is_value_model, engine.module = reached.value.args[0], False, ["first", "last"]
    engine.model_config = SimpleNamespace(mtp=SimpleNamespace(enable=False))
    engine._maybe_enable_fused_kernels()
    assert patched == (["first", "last"] if fused else [])


class Model(dict[str, Any]):
    """verl's HFModelConfig without the files that it reads."""

    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("states", "held"),
    [
        ("float32", {}),
        ("compact", {"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32}),
        ("bfloat16", {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}),
    ],
)
def test_adam_is_made_with_the_states_that_the_run_file_names(
    states: str, held: dict[str, torch.dtype], monkeypatch: pytest.MonkeyPatch
):
    """By Megatron, for Transformer Engine's Adam, which keeps them on a GPU only. "float32" leaves
    the states to Megatron and its own master weights.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import optimizer_config
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    def adam(
        params: Any, *, master_weight_dtype: Any = None, exp_avg_dtype: Any = None, exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: Any = None, store_param_remainders: Any = None, **_: Any,
    ) -> Any:  # fmt: skip
        found = {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}
        raise Reached({name: value for name, value in found.items() if value is not None}, store_param_remainders)

    transformer_engine = SimpleNamespace(FusedAdam=adam)
    monkeypatch.setitem(__import__("sys").modules, "transformer_engine.pytorch.optimizers", transformer_engine)
    for module in (optimizer, optimizer_config):
        monkeypatch.setattr(module, "is_te_min_version", lambda version: True)
    monkeypatch.setattr(optimizer, "Adam", adam)
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    config = init_megatron_optim_config(actor_config(f"memory.adam_states={states}").optim, bf16=True)
    with pytest.raises(Reached) as reached:
        optimizer._get_megatron_optimizer_based_on_param_groups(config, model_chunks=[], param_groups=["all"])
    found, remainders = reached.value.args
    assert found == held
    assert remainders is (True if held else None), "a master weight is the weight and its missing bits"


@pytest.mark.parametrize(("loss", "weight"), [("aux_loss", 0.25), ("global_aux_loss", 0.001)])
def test_a_balancing_loss_and_its_weight_are_one_setting(loss: str, weight: float):
    options = actor_config(f"experts.load_balancing={{ {loss} = {weight} }}").megatron.override_transformer_config
    assert (options["moe_router_load_balancing_type"], options["moe_aux_loss_coeff"]) == (loss, weight)
    assert "moe_aux_loss_coeff" not in actor_config().megatron.override_transformer_config


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallelism_splits_norms_and_dropout_too(tp: int):
    engine = actor_config("cluster.gpus_per_node=2", f"parallel.tp={tp}").megatron
    assert engine.sequence_parallel is engine.override_transformer_config["sequence_parallel"] is (tp > 1)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_tokens_are_sorted_by_the_kernel_that_the_run_file_names(fused: bool, monkeypatch: pytest.MonkeyPatch):
    """In Megatron's own dispatcher, up to the call; the fused kernel is Transformer Engine's."""
    from megatron.core.transformer.moe import token_dispatcher

    asked = f"verl_overrides.{MEGATRON}override_transformer_config.moe_permute_fusion=true"
    options = actor_config(*[asked] * fused).megatron.override_transformer_config
    plain = {"moe_router_padding_for_quantization": False, "moe_permute_fusion": False}

    def permute(*_: Any, **words: Any) -> Any:
        raise Reached(words["fused"])

    monkeypatch.setattr(token_dispatcher, "permute", permute)
    dispatcher = SimpleNamespace(
        config=SimpleNamespace(**{**plain, **options}), preprocess=lambda routing: None, shared_experts=None,
        _maybe_dtoh_and_synchronize=lambda *_: None, num_out_tokens=2, drop_and_pad=False,
    )  # fmt: skip
    routing = torch.tensor([[True, False], [False, True]])
    with pytest.raises(Reached) as reached:
        token_dispatcher.MoEAlltoAllTokenDispatcher.dispatch_preprocess(
            dispatcher, torch.zeros(2, 1, 4), routing, torch.ones(2, 2)
        )
    assert reached.value.args == (fused,)


def test_an_option_that_megatron_does_not_have_is_refused_before_anything_starts():
    asked = f"{MEGATRON}override_transformer_config.moe_permute_fusionn"
    with pytest.raises(ConfigError, match=rf"\[verl_overrides\] {re.escape(asked)} is not a key of verl"):
        actor_config(f"verl_overrides.{asked}=true")
    # MindSpeed's own are known where MindSpeed is.
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"verl_overrides.{MINDSPEED}=true"])
    assert OmegaConf.select(ppo_tree(config, get_platform("ascend")), MINDSPEED) is True
    with pytest.raises(ConfigError, match="use_flash_attn is not a key of verl"):
        ppo_tree(config, get_platform("cpu"))


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_processes_judge_as_the_run_file_says(count: int, monkeypatch: pytest.MonkeyPatch):
    from verl.experimental.reward_loop import reward_loop

    made: list[str] = []

    def options(name: str, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda *_: made.append(name) or name)

    node = {"NodeID": "0" * 56, "Alive": True, "Resources": {"CPU": 2}}
    monkeypatch.setattr("ray.nodes", lambda: [node])
    manager = SimpleNamespace(
        config=tree(f"reward.workers={count}"), reward_router_address=None,
        reward_loop_workers_class=SimpleNamespace(options=options),
    )  # fmt: skip
    reward_loop.RewardLoopManager._init_reward_loop_workers(manager)
    assert manager.reward_loop_workers == made and len(set(made)) == count


@pytest.mark.parametrize("longest", [100, 130])
def test_an_engine_has_room_for_the_longest_prompt_and_the_longest_response(longest: int):
    """verl's server keeps one token of the context."""
    from verl.workers.rollout import replica

    replica._load_sglang()
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    def generate_request(request: Any, _: Any) -> Any:
        raise Reached(request.sampling_params["max_new_tokens"])

    settings = tree(f"data.max_prompt_tokens={longest}", "rollout.max_response_tokens=50").actor_rollout_ref.rollout
    server = SimpleNamespace(
        config=settings, _disaggregation_role="null", lora_as_adapter=False, replica_rank=0,
        tokenizer_manager=SimpleNamespace(generate_request=generate_request),
    )  # fmt: skip
    for prompt, room in ((100, longest - 51), (longest, 49), (longest + 10, 39)):
        asked = {"max_new_tokens": 1000, "logprobs": True}
        with pytest.raises(Reached) as reached:
            asyncio.run(SGLangHttpServer.generate(server, [7] * prompt, asked, "request"))
        assert reached.value.args == (room,)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_critics_checkpoint_is_written_beside_the_training_where_the_run_file_says(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.utils.config import omega_conf_to_dataclass

    from retool_mcore.verl import workers

    settings = ("algorithm.name=ppo", f"checkpoint.asynchronous={str(asynchronous).lower()}")
    pending = SimpleNamespace(ended=lambda: False)
    calls: list[str] = []
    monkeypatch.setattr(workers, "save", lambda *_: calls.append("written"))
    monkeypatch.setattr(workers, "start_save", lambda *_: calls.append("begun") or pending)
    critic = object.__new__(workers.SavingCriticWorker)
    critic.engine = None
    critic.checkpoint_config = omega_conf_to_dataclass(tree(*settings).critic.checkpoint)
    critic.save_checkpoint(str(tmp_path), global_step=3)
    assert calls == (["begun"] if asynchronous else ["written"])
    assert critic.save_ended() is not asynchronous
