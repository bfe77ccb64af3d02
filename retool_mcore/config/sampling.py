"""How training and validation sample responses: prompts, tool loop, engines and sandbox."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from retool_mcore.config.base import Fraction, PositiveFloat, PositiveInt, Section, StepInterval
from retool_mcore.config.mcp import McpServer

INTERPRETER = "code_interpreter"
# Setting of [validation] -> setting of [rollout] whose value is its default.
SAME_AS_ROLLOUT = {"n": "group_size", "temperature": "temperature"}


class Prompts(Section):
    """The problems that responses are sampled for."""

    max_prompt_tokens: PositiveInt
    """Longest prompt in tokens, rendered with the chat template. A longer one is an error."""


class ToolLoop(Section):
    """The tool loop of a response, and the engines that serve it.

    Training, its validation and `retool eval` share these settings.
    """

    protocol: str = "hermes"
    """Format of calls and results: "hermes", "retool", or your own class, "module:Name".

    Native formats of other models are "qwen3_coder", "llama3" and "mistral". See
    rollout/protocol.py.
    """

    tools: list[str] = Field(default=[INTERPRETER])
    """Tools that the model may call: the interpreter and your own, "module:Name".

    Without "code_interpreter", the model has only your own tools and those of mcp. [] without mcp:
    no tools, which is the paper's baseline. See rollout/tools.py.
    """

    mcp: dict[str, McpServer] = Field(default={})
    """MCP servers whose tools the model may call as well, under names that you choose.

    See rollout/mcp.py.
    """

    max_turns: PositiveInt = 8
    """Maximum number of model turns in a trajectory. A call in the last turn does not run."""

    max_response_tokens: PositiveInt
    """Longest response in tokens, including interpreter output."""

    calls_per_turn: Literal["first", "all"] = "first"
    """"first": end a turn at its first call. "all": run all calls of a turn."""

    max_tool_output_tokens: PositiveInt = 512
    """Maximum tokens of one result. A longer one is cut in the middle, and a note marks the cut."""

    max_outage_s: PositiveFloat = 60.0
    """Seconds to retry a call while the sandbox is down. After that the trajectory is dropped."""

    engine_tp: PositiveInt = 1
    """Tensor parallel size of one engine, in GPUs."""

    engine_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Fraction of device memory for the engine.

    With SGLang, the fraction of the memory that is free at engine start, for weights and KV cache.
    With vLLM, the fraction of all memory, for the whole engine.
    """

    max_running_requests: PositiveInt = 64
    """Requests that one engine samples at the same time. Further requests wait."""

    batch_prefills: bool = True
    """Batch the prefills of new requests while many requests decode.

    A few new requests then wait for at most 16 decoding steps. This patches SGLang
    (platforms/patches_sglang.py). When false, SGLang prefills new requests before each decoding
    step.
    """

    engine_args: dict[str, Any] = Field(default={})
    """Further options, with the engine's own names: { attention_backend = "triton" }."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if len(set(self.tools)) != len(self.tools):
            raise ValueError(f"rollout.tools = {self.tools} names a tool twice. Name each tool once")
        return self

    @property
    def tool(self) -> bool:
        """Whether the model may call anything."""
        return bool(self.tools or self.mcp)

    def with_tools(self, tool: bool) -> Self:
        """The same settings with tools (the interpreter if there are none) or without tools."""
        if not tool:
            return self.model_copy(update={"tools": [], "mcp": {}})
        return self if self.tool else self.model_copy(update={"tools": [INTERPRETER]})


class Rollout(ToolLoop):
    """How training samples its groups of responses, with the tool loop and the engines.

    Validation and `retool eval` share the tool loop.
    """

    group_size: PositiveInt
    """Responses per prompt (G in GRPO)."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature. 1 samples from the model's own distribution."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1: sample from all tokens. Training refuses a lower value; set validation.top_p instead."""

    max_dropped_fraction: Fraction = 0.02
    """Largest fraction of a batch that may be dropped. Above it, the run stops.

    Outages of the sandbox and of the engines, and exceptions in tools, drop trajectories.
    """

    record_groups: Annotated[int, Field(ge=0)] = 2
    """Number of groups that each step and each validation writes to trajectories/; 0: none.

    Each validation records the same problems.
    """

    tracked_trajectories: Annotated[int, Field(ge=0)] = 0
    """Number of recorded trajectories that each step and validation sends to run.trackers; 0: none.

    Wrong and right ones alternate. They appear as a table, in TensorBoard as text. This
    uploads prompts and answers to the tracker.
    """

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of [cluster] that only serve rollouts, in train.mode "async"; 0 in the other modes.

    On several nodes they must be whole nodes. With 0, the engines share all GPUs with the trainer.
    """

    precision: Literal["model", "fp8"] = "model"
    """Precision of the engines' GEMMs: model.dtype, or FP8 with weights in blocks of 128 x 128.

    Each weight sync quantizes the weights. The actor and the export keep model.dtype. FP8 needs
    algorithm.importance_sampling, because engine and actor then differ more. It is faster with
    DeepGEMM (sgl-deep-gemm), not without it. Platform cuda only.
    """

    kv_cache: Literal["model", "fp8"] = "model"
    """Precision of the engines' KV cache: model.dtype, or FP8 (e4m3), in half the memory.

    The scale is 1, so the cache cannot represent values beyond 448. More responses fit into memory,
    but Triton's attention is not faster. FP8 needs algorithm.importance_sampling, as
    rollout.precision does. Validation uses the setting; `retool eval` does not. Platform cuda only.
    """

    agent_workers: PositiveInt = 1
    """Processes that run the tool loops, over all nodes."""

    @model_validator(mode="after")
    def _check_whole_distribution(self) -> Self:
        """Require top_p = 1: the actor's log-probabilities are over all tokens."""
        if self.top_p < 1:
            raise ValueError(
                f"rollout.top_p = {self.top_p} is below 1: training has to sample from all tokens, because the "
                "actor's log-probabilities are over all tokens. Set it to 1; validation.top_p may be lower"
            )
        return self


class HeldOut(Section):
    """How a policy is sampled on held-out problems."""

    files: list[str] = Field(default=[])
    """As in Validation; [] if `retool eval` gets its problems through --data."""

    n: PositiveInt
    """Samples per problem."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0: greedy decoding."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1: from all tokens."""


class Validation(HeldOut):
    """When and how the run's validation and `retool eval` score held-out problems.

    n and temperature default to rollout.group_size and rollout.temperature.
    """

    files: list[str] = Field(min_length=1)
    """Parquet, as in data.train_file. Problems are numbered across all files."""

    every: StepInterval
    """Steps between two validations; the last step is validated too. 0: never."""

    before: bool = False
    """Also validate the initial model, as step 0 of metrics.jsonl."""


def copy_rollout_sampling(tree: Any) -> Any:
    """Copy sampling settings that [validation] omits from [rollout] of a parsed run file."""
    if not isinstance(tree, dict):
        return tree
    sections = cast("dict[str, Any]", tree)
    rollout, validation = sections.get("rollout"), sections.get("validation")
    if not (isinstance(rollout, dict) and isinstance(validation, dict)):
        return sections
    sampling, own = cast("dict[str, Any]", rollout), cast("dict[str, Any]", validation)
    inherited = {name: sampling[source] for name, source in SAME_AS_ROLLOUT.items() if source in sampling}
    return {**sections, "validation": {**inherited, **own}}


class SandboxSettings(Section):
    """Where the model's code runs, and the limits of one execution."""

    where: list[str] = Field(default=["local"], min_length=1)
    """["local"]: in processes of the run. Or URLs of servers with SandboxFusion's protocol."""

    min_level: Literal["namespaces", "landlock", "rlimits"] = "namespaces"
    """Weakest isolation to accept. The choices are listed from strong to weak.

    The run uses the strongest level that works. It does not start if that is weaker than this one.
    See sandbox/README.md.
    """

    python: str = ""
    """Absolute path of the interpreter that runs the model's code; "": the run's interpreter.

    It must be CPython 3.11 or newer. It has its own packages and does not see the trainer's. This
    applies to where = ["local"] and to the service that the launch scripts start. Any other server
    has its own interpreter.
    """

    preload: list[str] = Field(default=[])
    """Modules to import once for all executions, in addition to those for mathematics.

    Use import names: ["pandas", "sklearn.linear_model"]. This applies to the same servers as
    python.
    """

    workers: PositiveInt = 2
    """Concurrent executions per node."""

    sessions: Annotated[int, Field(ge=0)] = 0
    """Interpreters per node that persist between a trajectory's calls; 0: a new one per call.

    Later calls see what earlier calls defined. Use at least sandbox.workers, and at least the
    number of trajectories in flight on a node: each keeps its interpreter until it ends.
    """

    run_timeout_s: PositiveFloat = 10.0
    """Seconds after which an execution is killed."""

    memory_limit_mb: PositiveInt = 1024
    """Memory limit of one execution, in MB."""

    @model_validator(mode="after")
    def _check_sessions_of_workers(self) -> SandboxSettings:
        if 0 < self.sessions < self.workers:
            raise ValueError(
                f"sandbox.sessions = {self.sessions} is below sandbox.workers = {self.workers}: each concurrent "
                "execution may need its own persistent interpreter. Raise it, or set 0"
            )
        return self
