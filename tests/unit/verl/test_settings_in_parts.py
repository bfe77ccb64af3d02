"""Settings followed to the part of Megatron or verl that has their effect, without a GPU."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.tree import ppo_tree
from tests.unit.verl.loss_scenario import actor_config, tree

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

MEGATRON = "actor_rollout_ref.actor.megatron."
MINDSPEED = f"{MEGATRON}override_transformer_config.use_flash_attn"


@pytest.mark.parametrize(("loss", "weight"), [("aux_loss", 0.25), ("global_aux_loss", 0.001)])
def test_a_balancing_loss_and_its_weight_are_one_setting(loss: str, weight: float):
    options = actor_config(f"experts.load_balancing={{ {loss} = {weight} }}").megatron.override_transformer_config
    assert (options["moe_router_load_balancing_type"], options["moe_aux_loss_coeff"]) == (loss, weight)
    assert "moe_aux_loss_coeff" not in actor_config().megatron.override_transformer_config


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallelism_splits_norms_and_dropout_too(tp: int):
    engine = actor_config("cluster.gpus_per_node=2", f"parallel.tp={tp}").megatron
    assert engine.sequence_parallel is engine.override_transformer_config["sequence_parallel"] is (tp > 1)


def test_an_option_that_megatron_does_not_have_is_refused_before_anything_starts():
    asked = f"{MEGATRON}override_transformer_config.moe_permute_fusionn"
    with pytest.raises(ConfigError, match=rf"\[verl_overrides\] {re.escape(asked)} is not a key of verl"):
        actor_config(f"verl_overrides.{asked}=true")
    # MindSpeed's own are known where MindSpeed is.
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"verl_overrides.{MINDSPEED}=true"])
    assert OmegaConf.select(ppo_tree(config, get_platform("ascend")), MINDSPEED) is True
    with pytest.raises(ConfigError, match="use_flash_attn is not a key of verl"):
        ppo_tree(config, get_platform("cpu"))


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


@pytest.mark.parametrize(("layers", "wanted"), [("2", ("full", "block", 2)), ("full", ("full", "uniform", 1))])
def test_megatron_recomputes_as_many_layers_as_the_run_file_says(layers: str, wanted: tuple[str, str, int]):
    options = actor_config(f"memory.recompute={layers}").megatron.override_transformer_config
    assert tuple(options[f"recompute_{name}"] for name in ("granularity", "method", "num_layers")) == wanted
