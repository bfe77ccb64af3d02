"""The sections of an RL run that say how responses are sampled and what is learnt from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from retool_mcore.config_base import Fraction, PositiveFloat, PositiveInt, Section


class Rollout(Section):
    """One multi-turn rollout. ``max_response_tokens`` includes interpreter output."""

    protocol: str = "hermes"  # how calls are written: one of rollout.protocol.PROTOCOLS
    tool: bool = True  # False: text only, the baseline of the paper's comparison
    group_size: PositiveInt  # responses per prompt, GRPO's G
    max_turns: PositiveInt = 8
    max_response_tokens: PositiveInt
    calls_per_turn: Literal["first", "all"] = "first"  # a turn is cut at its first call, or all of its calls are run
    max_tool_output_tokens: PositiveInt = 512  # of one result: more is cut in the middle, and the model is told
    max_tool_s: PositiveFloat = 300.0  # run time of the interpreter over a whole trajectory; then it ends
    max_malformed_calls: PositiveInt = 3  # in a row; then the trajectory ends
    max_refill_batches: PositiveInt = 10  # batches of prompts sampled anew for one step: filtered, failed, too old
    max_outage_s: PositiveFloat = 60.0  # a call is tried again for so long while the sandbox is away
    max_dropped_fraction: Fraction = 0.02  # of a batch, by sandbox or engine outages; above it the run stops
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    engine_tp: PositiveInt = 1
    engine_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    max_running_requests: PositiveInt = 64
    agent_workers: PositiveInt = 1
    engine_args: dict[str, Any] = Field(default={})  # the engine's own, by its names: attention_backend = "triton"


class Algorithm(Section):
    """GRPO, PPO with a critic, and DAPO's parts, all by verl's own implementations.

    DAPO is GRPO with clip_high above clip_low, loss_agg "token-mean", filter_groups and reward.overlong_buffer_tokens.

    filter_groups         another prompt takes the place of one whose answers are all right or all wrong
    importance_sampling   a token's loss is weighted by how much likelier the trained weights make it than the engine
                          that sampled it. "token": by its own ratio; "sequence": by the product over its response
    importance_threshold  a weight is at most this
    kl_coef               weight of the divergence from the first weights, in the loss; the paper has none
    """

    name: Literal["grpo", "ppo"] = "grpo"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    clip_c: PositiveFloat = 10.0
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    normalize_by_std: bool = True  # GRPO: a group's advantages are divided by the deviation of its rewards
    filter_groups: bool = False
    importance_sampling: Literal["off", "token", "sequence"] = "off"
    importance_threshold: Annotated[float, Field(ge=1)] = 2.0
    kl_coef: Annotated[float, Field(ge=0)] = 0.0


class Critic(Section):
    """PPO's value model: of the actor's shape and layout, from model.path with a new head, with [optim] but its lr."""

    lr: PositiveFloat = 1e-5
    clip_value: PositiveFloat = 0.5  # a value may move so far from its old one before its loss stops to fall
