"""The private names of verl, Megatron and Ray that this package overrides, calls or sets.

verl's registries and entry points let us replace its trainer and workers, but not parts of a step.
For those we use these private names. `retool preflight` lists them. tests/unit/verl/test_seams.py
checks that the list is complete and that the parameters have not changed.
"""

from retool_mcore.platforms.patches import Seam, requirement

_TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer."
_ASYNC = "verl.trainer.ppo.v1.trainer_separate_async.PPOTrainerSeparateAsync."
_REPLAY = "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer."
_CHECKPOINT = "verl.utils.checkpoint.megatron_checkpoint_manager.MegatronCheckpointManager."
_ADAPTERS = "verl trains adapters with mbridge, or this package moves to Megatron-Bridge"
_HOOKS = "verl's trainer calls hooks at this place of a step"
_PARTS = ("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values", "_compute_advantage", "_update_critic",
          "_update_actor")  # fmt: skip


def _verl(targets: str | tuple[str, ...], parameters: tuple[str, ...], reason: str, remove_when: str = _HOOKS) -> Seam:
    return Seam(
        targets=(targets,) if isinstance(targets, str) else targets,
        parameters=("self", *parameters),
        reason=reason,
        applies_to=requirement("verl"),
        remove_when=remove_when,
    )


SEAMS = (
    _verl(
        tuple(_TRAINER + part for part in _PARTS),
        ("batch", "metrics"),
        "verl/step.py calls these parts of verl's step one after the other",
        "verl's trainer has public parts of a step",
    ),
    _verl(
        (f"{_TRAINER}_init_resource_pool_mgr", f"{_ASYNC}_init_resource_pool_mgr"),
        (),
        "our training workers take the places of verl's in role_worker_mapping",
        "verl's configuration names the classes of its workers",
    ),
    _verl(
        f"{_TRAINER}_validate",
        (),
        "the value of best.metric is on disk before anything follows from it",
    ),
    _verl(
        f"{_TRAINER}_fetch_one_gen_batch",
        (),
        "prompts get names that the same run gives again, so that a seed fixes what is sampled",
        "verl names prompts by step and row",
    ),
    _verl(
        f"{_TRAINER}_compute_metrics",
        ("batch", "metrics", "timing_raw", "global_steps", "epoch"),
        "a step's row gets our names and FLOPs, and verl pads its columns to the longest response",
    ),
    _verl(
        f"{_TRAINER}_save_checkpoint",
        (),
        "a checkpoint is written beside the steps and is complete or absent",
        "verl's trainer waits for asynchronous saves and publishes a checkpoint when it is whole",
    ),
    _verl(
        f"{_REPLAY}_dapo_filtered_keys",
        ("partition_id",),
        "a group that outages left empty would end a run that filters groups; what failed counts as dropped",
        "verl's filter leaves out groups without trajectories, and verl counts the trajectories that failed",
    ),
    _verl(
        f"{_REPLAY}_select_prompt_uids",
        ("partition_id", "sampleable_keys", "batch_size"),
        "the seed decides among prompts that started together, not which of them ended first",
        "verl draws prompts from a seed",
    ),
    _verl(
        f"{_REPLAY}_wait_for_next_poll",
        ("partition_id", "last_debug_time"),
        "an engine that died is noticed and restarted while the trainer waits for a batch",
        "verl restarts the engines of its replicas",
    ),
    _verl(
        "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter._init_server_adapter",
        (),
        "it keeps a server's address in _engine, which is set to None when the server is started again",
        "verl's adapter looks for its server anew when that has died",
    ),
    _verl(
        f"{_CHECKPOINT}_dispatch_finalize",
        ("async_requests", "finalize_save_fn"),
        "a save's files are written by a process of ours, which the trainer can wait for or give up",
        "verl's workers tell when an asynchronous save has ended",
    ),
    _verl(
        "verl.workers.engine.megatron.transformer_impl.MegatronEngine._build_megatron_module",
        (),
        "with [lora] the model gets adapters before gradients' buffers and the optimizer are made",
        _ADAPTERS,
    ),
    Seam(
        targets=("verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ.__ray_actor_class__",),
        reason="verl's agent loops are a Ray actor class; ours start earlier, and a subclass needs the plain class",
        applies_to=requirement("ray"),
        remove_when="verl exports the plain class, or starts its agent loops while it builds the model",
    ),
    Seam(
        targets=("ray._private.services.ConsolePopen",),
        reason="a SIGTERM to the run's process group would end Ray's servers before the driver has saved",
        applies_to=requirement("ray"),
        remove_when="Ray starts its servers in process groups of their own",
    ),
    Seam(
        targets=("ray._private.state.actors",),
        parameters=("actor_id", "job_id", "actor_state_name"),
        reason="the run ends when an actor has died that nobody calls; Ray's public list needs its dashboard",
        applies_to=requirement("ray"),
        remove_when="Ray lists actors without a dashboard",
    ),
)
