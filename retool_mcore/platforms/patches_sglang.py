"""Patches of SGLang's processes, the most important first.

CUDA uses all five. The CPU uses the last four, and in addition those of cpu/patches.py.
"""

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from retool_mcore.platforms.base import PREFILLS_ENV
from retool_mcore.platforms.call_end import TABLE, TURN_TOKENS, CallEnd
from retool_mcore.platforms.patches import Change, Patch, requirement
from retool_mcore.platforms.weight_sums import with_sums

FEW = 4  # requests are few if they are less than a quarter of the decoding requests
MAX_DELAYED_STEPS = 16  # decode steps that the first request waits; a turn takes far more
DELAYED_STEPS = "_retool_delayed_steps"


def _without_host_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def region(self: Any, tag: str, enable_cpu_backup: bool = False) -> Any:
        return original(self, tag)

    return region


HOST_COPY_PATCH = Patch(
    changes=(
        Change(
            "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal.region",
            ("self", "tag", "enable_cpu_backup"),
            _without_host_copy,
        ),
    ),
    reason="each time an engine goes to sleep, verl makes it copy its weights to newly pinned host memory, although "
    "the weight sync that wakes it overwrites them all",
    gain="A step of 7B on two H200: 60.3 s instead of 71.4",
    applies_to=requirement("sglang"),
    remove_when="verl starts colocated engines with enable_weights_cpu_backup = False",
)


def prefill_together(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap Scheduler.get_new_batch_prefill: delay the prefill of few requests by some decode steps.

    SGLang prefills all waiting requests before each decode step. Trajectories end their turns at
    different times, so with 500 responses nearly every decode step waits for a prefill of a few
    tokens without a CUDA graph: 22 ms with a 0.5B model, whose decode step takes 10 ms. The rule
    counts requests and steps instead of seconds, so that all ranks of an engine decide alike.
    """

    @wraps(original)
    def get_new_batch_prefill(self: Any) -> Any:
        delayed_steps = getattr(self, DELAYED_STEPS, 0)
        if delayed_steps < MAX_DELAYED_STEPS and prefill_can_wait(self):
            setattr(self, DELAYED_STEPS, delayed_steps + 1)
            return None
        setattr(self, DELAYED_STEPS, 0)
        return original(self)

    return get_new_batch_prefill


def prefill_can_wait(scheduler: Any) -> bool:
    """Whether SGLang's ``scheduler`` has only few requests to prefill while many others decode."""
    running = scheduler.running_batch
    decoding = len(running.reqs)
    # In a full engine many requests wait, but only as many can start as have finished.
    enter = min(len(scheduler.waiting_queue), scheduler.get_num_allocatable_reqs(decoding))
    return (
        0 < enter * FEW < decoding
        and scheduler.chunked_req is None  # no chunked prefill is in progress
        and scheduler.prefill_delayer is None  # SGLang's own delayer is off, as by default
        and not running.is_prefill_only
        and not all(request.finished() for request in running.reqs)  # else no decode step would follow
    )


PREFILL_PATCH = Patch(
    changes=(Change("sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill", ("self",), prefill_together),),
    reason="each decoding step waits for a prefill of the few requests that arrived during the previous step; SGLang's "
    "own prefill delayer also holds back the last requests of a full engine while all others run",
    gain="Generation of 512 responses of 0.5B on an H100: 3.8 to 4.8 s instead of 6.6 to 8.7; "
    "rollout.batch_prefills = false disables it",
    applies_to=requirement("sglang"),
    remove_when="SGLang's prefill delayer can decide by its queue alone and counts steps instead of milliseconds",
)

_read = lru_cache(maxsize=8)(CallEnd.read)


def continue_without_a_tag(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Wrap Req._check_token_based_finish: undo a stop on a token that does not complete the tag.

    Then check the remaining new tokens, since speculative decoding adds several per step. If an
    abort interrupted the turn inside the tag, the start of the tag is in the prompt.
    """

    @wraps(original)
    def _check_token_based_finish(self: Any, new_accepted_tokens: Any) -> bool:
        custom = self.sampling_params.custom_params
        table = custom.get(TABLE) if isinstance(custom, dict) else None
        if table is not None and self.custom_logit_processor is None:
            # SGLang stores the request here for custom logit processors. The reference cycle would
            # keep a finished request's tokens and routes until a garbage collection.
            custom.pop("__req__", None)
        rest = new_accepted_tokens
        while original(self, rest):
            if table is None:
                return True
            call_end = _read(table)
            end = self.finished_len
            assert end is not None, "a request that ended has a length"
            if self.output_ids[end - 1] not in call_end.completing:
                return True
            window = call_end.max_tokens
            turn = list(self.output_ids[max(0, end - window) : end])
            if before := min(custom.get(TURN_TOKENS, 0), window - len(turn)):
                turn = [*self.origin_input_ids[-before:], *turn]
            if call_end.complete(turn):
                return True
            self.finished_reason, self.finished_len = None, None
            unread = len(self.output_ids) - end
            if not unread:
                return False
            rest = new_accepted_tokens[-unread:]
        return False

    return _check_token_based_finish


CALL_END_PATCH = Patch(
    changes=(
        Change(
            "sglang.srt.managers.schedule_batch.Req._check_token_based_finish",
            ("self", "new_accepted_tokens"),
            continue_without_a_tag,
        ),
    ),
    reason="every token that can complete </code> ends a request, but most such tokens (as in x > 3) complete no tag",
    gain="One request per turn and no token after a call; without it a request ends at each such token",
    applies_to=requirement("sglang"),
    remove_when="SGLang stops on sequences of token ids without a tokenizer in its scheduler",
)


WEIGHT_SUMS_PATCH = Patch(
    changes=(Change("sglang.srt.utils.weight_checker.WeightChecker.handle", ("self", "action"), with_sums),),
    reason="SGLang's checksum covers fused and sharded matrices, which the actor does not have, and needs CUDA",
    gain="A run ends with one error if an engine does not have the actor's weights after a sync",
    applies_to=requirement("sglang"),
    remove_when="SGLang reports checksums under the names in the model's files",
)

# Text models of sglang_models -> SGLang's vision models with the same layers.
VISION_MODELS = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}


def _with_text_configs(original: dict[str, Any]) -> dict[str, Any]:
    from retool_mcore.platforms.sglang_models.qwen3_5_config import MoeTextConfig, TextConfig

    return {**original, **{config.model_type: config for config in (TextConfig, MoeTextConfig)}}


def _as_for_vision_models(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Adjust the server's arguments for a text model as SGLang does for the vision model."""

    @wraps(original)
    def _handle_model_specific_adjustments(self: Any) -> None:
        config = self.get_model_config().hf_config
        names = config.architectures
        config.architectures = [VISION_MODELS.get(name, name) for name in names]
        try:
            original(self)
        finally:
            config.architectures = names

    return _handle_model_specific_adjustments


TEXT_MODELS_PATCH = Patch(
    changes=(
        Change("sglang.srt.utils.hf_transformers.config._CONFIG_REGISTRY", None, _with_text_configs),
        Change(
            "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments", ("self",), _as_for_vision_models
        ),
        # SGLang captures no prefill of the vision models either.
        Change(
            "sglang.srt.configs.model_config.piecewise_cuda_graph_disabled_model_archs",
            None,
            lambda original: [*original, *VISION_MODELS],
        ),
    ),
    reason="SGLang has Qwen3.5 only as vision models, and ServerArgs compares their names",
    gain="Without it no engine starts with a text model of Qwen3.5",
    applies_to=requirement("sglang"),
    remove_when="SGLang's models include Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM",
)


def shared_patches() -> tuple[Patch, ...]:
    """The patches that every platform with SGLang applies."""
    always = (CALL_END_PATCH, WEIGHT_SUMS_PATCH, TEXT_MODELS_PATCH)
    return always if os.environ.get(PREFILLS_ENV) == "0" else (PREFILL_PATCH, *always)
