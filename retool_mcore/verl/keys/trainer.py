"""verl's keys for RL's trainer: actor, critic, rewards, data, trainer and ray.init."""

from collections.abc import Sequence
from pathlib import Path

from retool_mcore.config import RlConfig
from retool_mcore.platforms.base import Platform, engine_environment
from retool_mcore.verl.keys.engine import chat_template
from retool_mcore.verl.keys.key import OUR_CODE, Key, from_setting
from retool_mcore.verl.keys.rollout import NODES, OUR_FOLDER, TRAINER_MODES, run_config_argument

RUN_CONFIG_KEY = "trainer.retool_config"  # our key in verl's tree: path of the run's settings
SAVED = ["model", "optimizer", "extra"]
FOLDER = "run.root and run.name"


def _local_ray(run: RlConfig, platform: Platform) -> bool:
    """Whether verl starts Ray and needs logical resources: a run on one node without devices."""
    return run.cluster.nodes == 1 and not platform.host.has_devices


def _absolute(paths: Sequence[str]) -> list[str]:
    return [str(Path(path).absolute()) for path in paths]


# All functions take the run and its platform. Keys under "actor_rollout_ref.actor.":
ACTOR_KEYS = (
    from_setting("ppo_mini_batch_size", "train.mini_batch_prompts"),
    Key("use_dynamic_bsz", "train.micro_batch_tokens", True),
    from_setting("ppo_max_token_len_per_gpu", "train.micro_batch_tokens"),
    Key("checkpoint.save_contents", None, SAVED),
    from_setting("checkpoint.async_save", "checkpoint.asynchronous"),
    Key("megatron.router_replay", "algorithm.router_replay"),
    from_setting(
        "megatron.router_replay.mode",
        "algorithm.router_replay",
        when=lambda run, _: run.algorithm.router_replay != "off",
    ),
)
# Set only for algorithm "ppo", which has a critic; refused for all algorithms.
CRITIC_KEYS = (
    from_setting("critic.model.path", "model.path"),
    Key("critic.model.custom_chat_template", "model.chat_template", chat_template),
    Key("critic.model.external_lib", "run.platform", lambda _, platform: platform.training.external_lib),
    Key("critic.model.use_remove_padding", None, True),
    Key("critic.ppo_mini_batch_size", "train.mini_batch_prompts"),  # verl interpolates the actor's
    Key("critic.ppo_max_token_len_per_gpu", "train.micro_batch_tokens"),
    # verl 0.9.1's trainer also uses this key for training.
    from_setting("critic.ppo_infer_max_token_len_per_gpu", "train.micro_batch_tokens"),
    Key("critic.checkpoint.save_contents", None, SAVED),
    from_setting("critic.checkpoint.async_save", "checkpoint.asynchronous"),
    # The optimizer's other keys have the actor's values.
    from_setting("critic.optim.lr", "critic.lr"),
    Key("critic.optim.min_lr", "critic.lr and optim.min_lr", lambda run, _: min(run.optim.min_lr, run.critic.lr)),
    Key("trainer.max_critic_ckpt_to_keep", "checkpoint.keep", None),
)
REWARD = (
    from_setting("reward.num_workers", "reward.workers"),
    Key("reward.custom_reward_function", "the section [reward]"),
    Key("reward.custom_reward_function.path", "the section [reward]", str(OUR_FOLDER / "reward.py")),
    Key("reward.custom_reward_function.name", "the section [reward]", "compute_score"),
    Key("reward.custom_reward_function.reward_kwargs", "the section [reward]", run_config_argument),
)
DATA = (
    Key("data.train_files", "data.train_file", lambda run, _: _absolute(run.train_files)),
    Key("data.val_files", "validation.files", lambda run, _: _absolute(run.validation.files)),
    from_setting("data.train_batch_size", "train.prompts_per_step"),
    from_setting("data.max_prompt_length", "data.max_prompt_tokens"),
    from_setting("data.max_response_length", "rollout.max_response_tokens"),
    *(Key(f"data.{name}", OUR_CODE) for name in ("train_max_samples", "val_max_samples", "filter_overlong_prompts")),
    Key("data.custom_cls", OUR_CODE),
    Key("data.custom_cls.path", OUR_CODE, str(OUR_FOLDER / "dataset.py")),
    Key("data.custom_cls.name", OUR_CODE, "ReToolDataset"),
    Key("data.return_raw_chat", None, True),
    from_setting("data.seed", "run.seed"),
    Key("data.truncation", None, "error"),
    Key("data.dataloader_num_workers", None, 0),  # prompts are a few strings, not worth worker processes
)
TRAINER = (
    Key("trainer.device", "run.platform", lambda _, platform: platform.device.name),
    Key("trainer.nnodes", NODES, lambda run, _: run.cluster.nodes),
    Key("trainer.n_gpus_per_node", NODES, lambda run, _: run.cluster.gpus_per_node),
    from_setting("trainer.total_training_steps", "train.steps"),
    Key("trainer.total_epochs", "train.steps", 1_000_000),  # the number of steps ends the run
    Key("trainer.project_name", None, "retool"),
    from_setting("trainer.experiment_name", "run.name"),
    # run/metrics.py writes the metrics; verl's file would keep steps that a resumed run repeats.
    Key("trainer.logger", None, ["console"]),
    Key("trainer.default_local_dir", FOLDER, lambda run, _: str(run.run.dir.absolute() / "checkpoints")),
    Key("trainer.rollout_data_dir", None, None),
    Key("trainer.save_freq", "checkpoint.every_steps", lambda run, _: run.saved_every or -1),
    # run/checkpoint.py deletes old checkpoints, also after a restart.
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", None),
    Key("trainer.test_freq", "validation.every", lambda run, _: run.validation.every or -1),
    from_setting("trainer.val_before_train", "validation.before"),
    Key("trainer.v1.trainer_mode", "train.mode", lambda run, _: TRAINER_MODES[run.train.mode]),
    Key(RUN_CONFIG_KEY, FOLDER, lambda run, _: str(run.run.config_file)),
    # Start fewer TransferQueue storage processes than verl's 8: their imports compete with those of
    # the workers for cores.
    Key(
        "transfer_queue.backend.SimpleStorage.num_data_storage_units",
        None,
        lambda _, platform: 2 if platform.host.has_devices else 1,
        when=lambda run, platform: not platform.host.has_devices or run.cluster.num_gpus == 1,
    ),
    Key(
        "transfer_queue.backend.SimpleStorage.total_storage_size",
        None,
        4_000,
        when=lambda _, platform: not platform.host.has_devices,
    ),
)
RAY_INIT = "ray_kwargs.ray_init."
RAY = (
    # Workers on other nodes inherit their shells' environment. verl passes these variables to every
    # process of the run.
    Key(
        f"{RAY_INIT}runtime_env.env_vars",
        None,
        lambda run, platform: platform.process_env() | engine_environment(run.rollout),
        when=lambda run, _: run.cluster.nodes > 1,
    ),
    # A logical count: the actors mostly wait, so a few real cores are enough.
    Key(f"{RAY_INIT}num_cpus", None, 16, when=_local_ray),
    # A logical count: one per Megatron or engine process.
    Key(f"{RAY_INIT}num_gpus", "cluster.gpus_per_node", lambda run, _: run.cluster.gpus_per_node, when=_local_ray),
    Key(f"{RAY_INIT}include_dashboard", None, False, when=_local_ray),
    Key(f"{RAY_INIT}object_store_memory", None, 300_000_000, when=_local_ray),
)
# The functions take the folder of the checkpoint to resume from, or None. run/checkpoint.py chooses
# a complete one. verl needs both keys.
RESUME = (
    Key("trainer.resume_mode", "checkpoint.resume", lambda resume: "resume_path" if resume else "disable"),
    Key(
        "trainer.resume_from_path",
        "checkpoint.resume",
        lambda resume: str(resume.absolute()),
        when=lambda resume: resume is not None,
    ),
)
