"""Keys of verl's run files that this trainer never sets, for `retool config from-verl`.

They belong to parts of verl that do not run here: its FSDP engine, its own loop of tools, its own
reward. The other tables of this folder have all the rest.
"""

from retool_mcore.verl.keys.key import Key
from retool_mcore.verl.keys.refused import ACTOR
from retool_mcore.verl.keys.rollout import UNDER

FSDP = "it is of verl's FSDP engine, and Megatron trains here: the sections [parallel] and [memory]"
PACKED = "micro-batches are packed to train.micro_batch_tokens here, in every pass"
JUDGE = "the reward is of the section [reward]; reward.function names one of your own"
PF_PPO = "PF-PPO draws responses again by their rewards, and no algorithm.name here does"
OWN_LOOP = "this trainer has a loop of tools of its own: the section [rollout]"

# What a setting of ours says as well.
SAME = (
    Key(f"{ACTOR}ulysses_sequence_parallel_size", "parallel.cp"),
    Key(f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size", "parallel.cp"),
    Key(f"{ACTOR}fsdp_config.param_offload", "memory.offload_idle"),
    Key(f"{ACTOR}fsdp_config.optimizer_offload", "memory.offload_idle"),
    Key("trainer.nnodes", "cluster.nodes"),
    Key("trainer.n_gpus_per_node", "cluster.gpus_per_node"),
    Key(f"{UNDER}val_kwargs.n", "validation.n"),
    Key(f"{UNDER}val_kwargs.temperature", "validation.temperature"),
    Key(f"{UNDER}val_kwargs.top_p", "validation.top_p"),
    Key(f"{UNDER}multi_turn.enable", "rollout.tools"),
    Key(f"{UNDER}multi_turn.format", "rollout.protocol"),
)
# What none says, and why. The longest beginning of a key counts.
NONE: dict[str, str] = {
    "hydra": "verl composes its tree from files; here one file is a run",
    "defaults": "verl composes its tree from files; here one file is a run",
    f"{ACTOR}strategy": FSDP,
    f"{ACTOR}fsdp_config": FSDP,
    "actor_rollout_ref.ref": "the initial weights have the actor's layout, and are loaded where algorithm.kl_coef > 0",
    "critic": 'the critic has the actor\'s layout, and settings in [critic] with algorithm.name = "ppo"',
    "actor_rollout_ref.model.enable_gradient_checkpointing": "memory.recompute says what is computed again",
    f"{ACTOR}ppo_micro_batch_size": PACKED,
    f"{ACTOR}use_dynamic_bsz": PACKED,
    f"{UNDER}log_prob": PACKED,
    f"{ACTOR}ppo_epochs": "a step's responses are learnt from once",
    f"{ACTOR}clip_ratio": "verl's loss reads clip_ratio_low and clip_ratio_high",
    f"{UNDER}val_kwargs.do_sample": "verl's agent loop reads val_kwargs.temperature alone; 0 takes the likeliest token",
    f"{UNDER}multi_turn.max_user_turns": "rollout.max_turns counts the model's turns; results are no turns here",
    f"{UNDER}multi_turn.tool_config_path": "rollout.tools and rollout.mcp name what may be called",
    f"{UNDER}multi_turn.max_tool_response_length": (
        "rollout.max_tool_output_tokens counts tokens, and this key counts characters"
    ),
    f"{UNDER}multi_turn.tool_response_truncate_side": "a long result is cut in its middle, and the model is told",
    f"{UNDER}multi_turn.max_parallel_calls": 'rollout.calls_per_turn is "first" or "all"',
    f"{UNDER}multi_turn": OWN_LOOP,
    "algorithm.use_pf_ppo": PF_PPO,
    "algorithm.pf_ppo": PF_PPO,
    "data.filter_overlong_prompts": "a prompt above data.max_prompt_tokens is an error; `retool data lint` finds it",
    "data.tool_config_path": "rollout.tools and rollout.mcp name what may be called",
    "custom_reward_function": JUDGE,
    "reward_model": JUDGE,
    "reward": JUDGE,
    "trainer.total_epochs": "steps decide here: write train.steps",
    "trainer.logger": "run.trackers names them, and metrics.jsonl is always written",
    "trainer.project_name": "a tracker groups runs by run.name",
}
