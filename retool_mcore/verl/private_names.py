"""The private names of verl, Megatron and Ray that this package overrides, calls or sets.

verl's registries and entry points let us replace its trainer and workers, but not parts of a step.
For those we use these private names. `retool preflight` lists them. A test in tests/unit/verl
checks that the names exist and that their parameters have not changed.
"""

from retool_mcore.platforms.patches import Seam, requirement

_TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer."
_ASYNC = "verl.trainer.ppo.v1.trainer_separate_async.PPOTrainerSeparateAsync."
_REPLAY = "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer."
_PARTS = ("old_log_prob", "ref_log_prob", "values", "advantage")
_HOOKS = "verl's trainer calls hooks at this place of a step"


def _verl(target: str, parameters: tuple[str, ...], reason: str, remove_when: str, *more: str) -> Seam:
    return Seam(
        targets=(target, *more),
        parameters=("self", *parameters),
        reason=reason,
        applies_to=requirement("verl"),
        remove_when=remove_when,
    )


SEAMS = (
    _verl(
        _TRAINER + "_update_actor",
        ("batch", "metrics"),
        "verl/step.py calls the parts of verl's step one after the other",
        "verl makes the parts of a step public",
        _TRAINER + "_update_critic",
        *(f"{_TRAINER}_compute_{part}" for part in _PARTS),
        _ASYNC + "_compute_old_log_prob",
    ),
    _verl(
        _TRAINER + "_init_resource_pool_mgr",
        (),
        "our training workers replace verl's in role_worker_mapping",
        "verl's configuration names the classes of its workers",
        _ASYNC + "_init_resource_pool_mgr",
    ),
    _verl(
        _TRAINER + "_load_checkpoint",
        (),
        "the transfer queue starts while verl builds the workers, and a checkpoint fills it",
        "verl starts the transfer queue while it builds the workers",
    ),
    _verl(
        _TRAINER + "_validate",
        (),
        "a validation's value of best.metric must be on disk before the run acts on it",
        _HOOKS,
    ),
    _verl(
        _TRAINER + "_fetch_one_gen_batch",
        (),
        "a resumed run must give prompts the same uids, so that a seed determines what is sampled",
        "verl derives uids from step and row",
    ),
    _verl(
        _TRAINER + "_compute_metrics",
        ("batch", "metrics", "timing_raw", "global_steps", "epoch"),
        "we add our metrics and FLOPs to a step's row",
        _HOOKS,
    ),
    _verl(
        _TRAINER + "_save_checkpoint",
        (),
        "a checkpoint is written during the next steps and is complete or absent",
        "verl's trainer waits for asynchronous saves and publishes only complete checkpoints",
    ),
    _verl(
        _REPLAY + "_dapo_filtered_keys",
        ("partition_id",),
        "verl's filter fails on a group that outages left empty; we also count failed trajectories as dropped",
        "verl's filter skips groups without trajectories, and verl counts failed trajectories",
    ),
    _verl(
        _REPLAY + "_select_prompt_uids",
        ("partition_id", "sampleable_keys", "batch_size"),
        "the seed, not the order of arrival, selects among prompts of the same step",
        "verl selects prompts from a seed",
    ),
    _verl(
        _REPLAY + "_wait_for_next_poll",
        ("partition_id", "last_debug_time"),
        "the trainer finds and restarts dead engines while it waits for a batch",
        "verl restarts the engines of its replicas",
    ),
    _verl(
        "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter._init_server_adapter",
        (),
        "it caches a server's address in _engine, which we clear when the server restarts",
        "verl's adapter looks up a restarted server",
    ),
    _verl(
        "verl.utils.checkpoint.megatron_checkpoint_manager.MegatronCheckpointManager._dispatch_finalize",
        ("async_requests", "finalize_save_fn"),
        "our forked process writes a checkpoint's files, and the trainer can wait for it or kill it",
        "verl's workers report when an asynchronous save has finished",
    ),
    _verl(
        "verl.workers.engine.megatron.transformer_impl.MegatronEngine._build_megatron_module",
        (),
        "with [lora] the model gets adapters before its gradient buffers and optimizer exist",
        "Megatron-Bridge's CanonicalLoRA needs no Transformer Engine, and supports a base in FP8",
    ),
    Seam(
        targets=("verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ.__ray_actor_class__",),
        reason="verl's agent-loop worker is a Ray actor class, and a subclass needs the plain class",
        applies_to=requirement("ray"),
        remove_when="verl exports the plain class, or starts its agent loops while it builds the model",
    ),
    Seam(
        targets=("verl.workers.rollout.replica.RolloutReplicaRegistry._registry",),
        reason="the engine's import, which a registered loader does, starts before verl needs it",
        applies_to=requirement("verl"),
        remove_when="verl imports the engine while it builds the workers",
    ),
    Seam(
        targets=("ray._private.services.ConsolePopen",),
        reason="a SIGTERM to the run's process group would end Ray's servers before the driver has saved",
        applies_to=requirement("ray"),
        remove_when="Ray starts its servers in separate process groups",
    ),
    Seam(
        targets=("ray._private.state.actors",),
        parameters=("actor_id", "job_id", "actor_state_name"),
        reason="the run ends when an actor that nobody calls dies; Ray's public list needs its dashboard",
        applies_to=requirement("ray"),
        remove_when="Ray lists actors without a dashboard",
    ),
)
