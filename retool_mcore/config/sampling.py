"""How responses are sampled, in training and on held-out problems: prompts, tool loop, sandbox."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from retool_mcore.config.base import Fraction, PositiveFloat, PositiveInt, Section, StepInterval
from retool_mcore.config.mcp import McpServer

INTERPRETER = "code_interpreter"
# Settings of [validation] -> those of [rollout] that they are when left out.
SAME_AS_ROLLOUT = {"n": "group_size", "temperature": "temperature"}


class Prompts(Section):
    """The problems that answers are sampled to."""

    max_prompt_tokens: PositiveInt
    """Longest prompt in tokens, as the model's chat template renders it; more is an error."""


class ToolLoop(Section):
    """The loop of one response, and the engines that serve it.

    Training, its validation and `retool eval` have it in common.
    """

    protocol: str = "hermes"
    """How calls and results are written: "hermes", "retool", or "module:Name", a class of your own.

    Native forms of other models are "qwen3_coder", "llama3" and "mistral". See rollout/protocol.py.
    """

    tools: list[str] = Field(default=[INTERPRETER])
    """What may be called: the interpreter, and tools of your own, "module:Name".

    Without "code_interpreter" your own tools alone, and those of mcp; [] without mcp: text only,
    the baseline of the paper's comparison. See rollout/tools.py.
    """

    mcp: dict[str, McpServer] = Field(default={})
    """Servers of the Model Context Protocol whose tools may be called, too, by names of yours.

    See rollout/mcp.py.
    """

    max_turns: PositiveInt = 8
    """Turns of the model in one trajectory; the last one's call is not run."""

    max_response_tokens: PositiveInt
    """Longest response in tokens, interpreter output included."""

    calls_per_turn: Literal["first", "all"] = "first"
    """Cut a turn at its first call, or run all of its calls."""

    max_tool_output_tokens: PositiveInt = 512
    """Tokens shown of one result; a longer one is cut in the middle, and the model is told."""

    max_outage_s: PositiveFloat = 60.0
    """Seconds to retry a call while the sandbox is away; then the trajectory is dropped."""

    engine_tp: PositiveInt = 1
    """GPUs that share one engine, by tensor parallelism."""

    engine_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Share of a device's memory for the engine.

    SGLang: for weights and cache, of what is free when it starts; vLLM: for everything, of all.
    """

    max_running_requests: PositiveInt = 64
    """Requests that one engine samples at the same time; others wait."""

    batch_prefills: bool = True
    """While many requests decode, prefill new ones together: a few wait for at most 16 steps.

    This patches SGLang (platforms/patches_sglang.py). When false, each step waits for a prefill.
    """

    engine_args: dict[str, Any] = Field(default={})
    """The engine's own settings, by its names for them: attention_backend = "triton"."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if len(set(self.tools)) != len(self.tools):
            raise ValueError(f"rollout.tools = {self.tools} must name each tool once")
        return self

    @property
    def tool(self) -> bool:
        """Whether anything may be called."""
        return bool(self.tools or self.mcp)

    def calling(self, tool: bool) -> Self:
        """The loop with its tools, or the interpreter where it has none; or without any."""
        if not tool:
            return self.model_copy(update={"tools": [], "mcp": {}})
        return self if self.tool else self.model_copy(update={"tools": [INTERPRETER]})


class Rollout(ToolLoop):
    """How training samples its groups of responses: the loop of one, and the engines for it.

    Its validation and `retool eval` have that loop in common.
    """

    group_size: PositiveInt
    """Responses per prompt, GRPO's G."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; 1 samples from the model's own probabilities."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1: sample from all tokens. Training refuses less; set validation.top_p instead."""

    max_dropped_fraction: Fraction = 0.02
    """Fraction of a batch that sandbox or engine outages may cost; above it the run stops."""

    record_groups: Annotated[int, Field(ge=0)] = 2
    """Groups per step, and per validation, that are written to trajectories/; 0: none.

    Of validations the same problems each time.
    """

    tracked_trajectories: Annotated[int, Field(ge=0)] = 0
    """Trajectories of these groups that a step, and a validation, gives to run.trackers; 0: none.

    A wrong and a right one in turns, as a table (TensorBoard: texts). A tracker's server then has
    the prompts and answers.
    """

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of [cluster] that serve rollouts and do not train, in train.mode "async"; else 0.

    Of several nodes they are whole ones. With 0, the engines share all GPUs with the trainer.
    """

    precision: Literal["model", "fp8"] = "model"
    """Of the engines' matrix products: as model.dtype, or FP8, its weights in blocks of 128 x 128.

    Quantised in each weight sync; the actor and what is exported stay as model.dtype. Needs
    algorithm.importance_sampling, as engine and actor then differ more. Faster with DeepGEMM
    (sgl-deep-gemm), not without. Platform cuda only.
    """

    kv_cache: Literal["model", "fp8"] = "model"
    """Of the engines' cache of keys and values: as model.dtype, or FP8 (e4m3), in half the memory.

    With a scale of 1, so nothing beyond 448 can be told in it. More responses fit at once; with
    Triton's attention none is sampled faster. Needs algorithm.importance_sampling, as
    rollout.precision does. Validation samples with it, `retool eval` does not. Platform cuda only.
    """

    agent_workers: PositiveInt = 1
    """Processes that run the loops of trajectories, over all nodes."""

    @model_validator(mode="after")
    def _check_whole_distribution(self) -> Self:
        """The loss compares log-probabilities over all tokens with those of the sampler."""
        if self.top_p < 1:
            raise ValueError(
                f"rollout.top_p = {self.top_p}: training has to sample from all tokens, because the actor's "
                "log-probabilities are over all of them. Set 1 here; validation.top_p may be lower"
            )
        return self


class HeldOut(Section):
    """How a policy is scored on held-out problems."""

    files: list[str] = Field(default=[])
    """As in Validation; none where `retool eval` is told its problems by --data."""

    n: PositiveInt
    """Samples per problem."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0: always the likeliest token."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this probability together; 1: from all."""


class Validation(HeldOut):
    """When and how a run's own validation and `retool eval` score the policy on held-out problems.

    When n or temperature is left out, it is group_size or temperature of [rollout].
    """

    files: list[str] = Field(min_length=1)
    """Parquet, as data.train_file; problems are numbered across all files."""

    every: StepInterval
    """Steps between two validations, and one after the last step; 0: never."""

    before: bool = False
    """Also validate the model that training starts from, as step 0 of metrics.jsonl."""


def sampled_as_rollout(tree: Any) -> Any:
    """Fill the sampling settings that [validation] leaves out from [rollout], in a run's tree."""
    if not isinstance(tree, dict):
        return tree
    sections = cast("dict[str, Any]", tree)
    rollout, validation = sections.get("rollout"), sections.get("validation")
    if not (isinstance(rollout, dict) and isinstance(validation, dict)):
        return sections
    sampling, own = cast("dict[str, Any]", rollout), cast("dict[str, Any]", validation)
    given = {name: sampling[theirs] for name, theirs in SAME_AS_ROLLOUT.items() if theirs in sampling}
    return {**sections, "validation": {**given, **own}}


class SandboxSettings(Section):
    """Where the model's code runs, and what one execution may use."""

    where: list[str] = Field(default=["local"], min_length=1)
    """["local"]: in processes of the run; or URLs that speak SandboxFusion's protocol."""

    min_level: Literal["namespaces", "landlock", "rlimits"] = "namespaces"
    """The weakest isolation to accept, strongest first here; see sandbox/README.md.

    Less is an error at start. The strongest that works is taken.
    """

    python: str = ""
    """The interpreter that runs the model's code: an absolute path; "": the one of the run.

    CPython 3.11 or newer, with packages of its own: of the trainer's it sees none. For where =
    ["local"] and for the service that the launch scripts start; another server has its own.
    """

    preload: list[str] = Field(default=[])
    """Modules that are imported once, for all executions, beyond those for mathematics.

    By their import names: ["pandas", "sklearn.linear_model"]. For the same servers as python.
    """

    workers: PositiveInt = 2
    """Concurrent executions per node."""

    sessions: Annotated[int, Field(ge=0)] = 0
    """Interpreters per node that live on between a trajectory's calls; 0: each call has a new one.

    What a call defines is then there in the next ones. At least workers, and as many as
    trajectories can be at work on a node: each keeps its own to its end, and others wait.
    """

    run_timeout_s: PositiveFloat = 10.0
    """Seconds that one execution may run before it is killed."""

    memory_limit_mb: PositiveInt = 1024
    """Memory of one execution, in MB."""

    @model_validator(mode="after")
    def _check_sessions_of_workers(self) -> SandboxSettings:
        if 0 < self.sessions < self.workers:
            raise ValueError(
                f"sandbox.sessions = {self.sessions} is below sandbox.workers = {self.workers}: each execution may "
                "need an interpreter that lives on. Raise it, or set 0"
            )
        return self
