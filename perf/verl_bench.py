r"""Measures verl's own RL on an RL case, for comparison with ours on the same GPUs.

    python perf/verl_bench.py rl_7b_h200x2 --model DIR --data DIR/rl.parquet --warmup 1 --steps 3 \
        --out verl.json [--set section.key=value] [-- verl.key=value ...]

It starts verl.trainer.main_ppo as released: FSDP2 trains, SGLang samples on the same GPUs, and
verl's ToolAgentLoop calls a sandbox server over HTTP. It loads nothing of ours except
perf/verl_parts.py, through verl's own keys. Prompts, lengths, calls, loss and SGLang's arguments
come from the case; other settings are tuned for two H200. Steps and times come from verl's log.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from bench import ROOT, config_of, length_histogram, provenance, run_to_its_end, summarize

from retool_mcore.cli.common import guarded
from retool_mcore.config import RlConfig
from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.platforms.base import PLATFORM_ENV, get_platform
from retool_mcore.run.metrics import read_metrics, token_rates
from retool_mcore.verl.keys.algorithm import ALGORITHM
from retool_mcore.verl.keys.key import values
from retool_mcore.verl.keys.rollout import engine_args

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
TRAINING_TOKENS = 7168  # per micro-batch and GPU: a 7B keeps about 8 MB per token without recomputation
SCORING_TOKENS = 16384  # per micro-batch and GPU, in passes without backward
ENGINE_MEMORY = 0.5
AGENT = "scripted_tool_agent"
LOSS = "flash_attn.ops.triton.cross_entropy"
# Our variables to remove from the environment. The last one is for Megatron and slows down FSDP.
OUR_ENV = (PLATFORM_ENV, "VERL_PLATFORM", "CUDA_DEVICE_MAX_CONNECTIONS")
PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")  # verl's timers of a step
MEMORY = "actor/perf/max_memory_allocated_gb"
TOOL_SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "A tool for executing code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute."}},
            "required": ["code"],
        },
    },
}


@guarded
def bench(
    case: Annotated[str, typer.Argument(help="a table of perf/cases.toml, of kind rl")],
    overrides: Annotated[list[str] | None, typer.Argument(help="verl.key=value ...", show_default=False)] = None,
    *,
    model: Annotated[str, typer.Option()],
    data: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option()] = Path("verl.json"),
    changed: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value for the case; repeatable", show_default=False)
    ] = None,
    warmup: Annotated[int, typer.Option(min=1, help="steps to discard")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="steps to measure")] = 3,
) -> None:
    config = config_of(RlConfig, case, model, data, steps=warmup + steps, overrides=changed or ())
    require_flash_attention(overrides or ())
    for name in OUR_ENV:
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="verl_bench_") as name, sandbox_server(config) as url:
        folder = Path(name)
        write_parts(config, folder, url)
        words = [*hydra_words(verl_keys(config, folder)), *(overrides or ())]
        os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / "steps.jsonl")
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words, f"hydra.run.dir={folder / 'hydra'}"]
        with out.with_suffix(".log").open("wb") as log:
            code = run_to_its_end(command, log)
        rows = read_steps(folder / "steps.jsonl", config.cluster.num_gpus)
    record = {
        "case": case,
        "engine": "verl",
        "command": ["python", "perf/verl_bench.py", *sys.argv[1:]],
        "exit_code": code,
        "provenance": provenance(config) | {"verl_keys": words},
        "lengths": length_histogram(rows[warmup:]),
        "warmup_steps": warmup,
        "steps": rows[warmup:],
        "summary": summarize(rows[warmup:]),
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    typer.echo(json.dumps({"case": case, "engine": "verl", "exit_code": code, "steps": len(rows), **record["summary"]}))
    raise typer.Exit(code)


def require_flash_attention(overrides: Sequence[str]) -> None:
    """Raise ConfigError if verl would use slow Python loops, which would be unfair to verl."""
    overridden = any("attn_implementation" in word for word in overrides)
    if not overridden and (importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec(LOSS) is None):
        raise ConfigError(
            f"flash_attn or {LOSS} is missing, but verl's FSDP engine needs both for packed sequences. Install "
            "flash-attn. To run without it, but too slowly for a comparison, add: "
            "-- ++actor_rollout_ref.model.override_config.attn_implementation=sdpa"
        )


@contextmanager
def sandbox_server(config: RlConfig) -> Generator[str]:
    """Run `retool sandbox serve` with the case's number of workers; yields its URL."""
    s = config.sandbox
    options = ["--port", "0", "--workers", str(s.workers), "--min-level", s.min_level]
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            if not url:
                raise SandboxUnavailable(f"{' '.join(command)} failed with status {server.wait()}. Its error is above.")
            yield url
        finally:
            server.terminate()


def write_parts(config: RlConfig, folder: Path, url: str) -> None:
    """Write the files through which verl finds the agent loop and tool of perf/verl_parts.py."""
    loops = [{"name": AGENT, "_target_": "verl_parts.ScriptedToolAgentLoop"}]
    (folder / "loops.yaml").write_text(yaml.safe_dump(loops), encoding="utf-8")
    s = config.sandbox
    settings = {"url": f"{url}/run_code", "run_timeout_s": s.run_timeout_s, "memory_limit_mb": s.memory_limit_mb}
    tool = {"class_name": "verl_parts.CodeTool", "config": {"type": "native", **settings}, "tool_schema": TOOL_SCHEMA}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool]}), encoding="utf-8")


def verl_keys(config: RlConfig, folder: Path) -> dict[str, Any]:
    """Changes to verl's default configuration, by verl's keys."""
    return {
        **values(ALGORITHM, config),
        **_actor_keys(config),
        **_rollout_keys(config, folder),
        **_trainer_keys(config, folder),
    }


def _actor_keys(config: RlConfig) -> dict[str, Any]:
    o = config.optim
    return {
        "actor_rollout_ref.model.path": config.model.path,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        ACTOR + "strategy": "fsdp2",
        ACTOR + "fsdp_config.forward_prefetch": True,
        ACTOR + "ppo_mini_batch_size": config.train.mini_batch_prompts,
        ACTOR + "use_dynamic_bsz": True,
        ACTOR + "ppo_max_token_len_per_gpu": max(TRAINING_TOKENS, config.max_sequence_tokens),
        ACTOR + "optim.lr": o.lr,
        ACTOR + "optim.weight_decay": o.weight_decay,
        ACTOR + "optim.betas": o.betas,
        ACTOR + "optim.clip_grad": o.clip_grad,
        ACTOR + "optim.lr_scheduler_type": o.schedule,
        ACTOR + "optim.override_optimizer_config.fused": True,
        ROLLOUT + "log_prob_max_token_len_per_gpu": max(SCORING_TOKENS, config.max_sequence_tokens),
    }


def _rollout_keys(config: RlConfig, folder: Path) -> dict[str, Any]:
    r = config.rollout
    keys: dict[str, Any] = {
        "name": "sglang",
        "mode": "async",
        "n": r.group_size,
        "temperature": r.temperature,
        "top_p": r.top_p,
        "dtype": config.model.dtype,
        **({"quantization": r.precision} if r.precision != "model" else {}),
        "tensor_model_parallel_size": r.engine_tp,
        "gpu_memory_utilization": ENGINE_MEMORY,
        "max_num_seqs": r.max_running_requests,
        "max_model_len": config.max_sequence_tokens,
        "calculate_log_probs": True,
        "agent.num_workers": r.agent_workers,
        "agent.default_agent_loop": AGENT,
        "agent.agent_loop_config_path": str(folder / "loops.yaml"),
        "multi_turn.enable": True,
        "multi_turn.format": "hermes",
        "multi_turn.max_assistant_turns": r.max_turns,
        "multi_turn.tool_config_path": str(folder / "tools.yaml"),
    }
    args = engine_args(config, get_platform(config.run.platform))
    del args["random_seed"]  # we set a different seed per engine; verl's engines draw their own
    keys |= {f"engine_kwargs.sglang.{name}": value for name, value in args.items()}
    return {ROLLOUT + name: value for name, value in keys.items()}


def _trainer_keys(config: RlConfig, folder: Path) -> dict[str, Any]:
    data = [str(Path(config.data.train_file).absolute())]
    return {
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": config.train.prompts_per_step,
        "data.max_prompt_length": config.data.max_prompt_tokens,
        "data.max_response_length": config.rollout.max_response_tokens,
        "data.return_raw_chat": True,
        "data.truncation": "error",
        "reward.num_workers": config.reward.workers,
        "reward.custom_reward_function.path": str(ROOT / "perf" / "verl_parts.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.nnodes": config.cluster.nodes,
        "trainer.n_gpus_per_node": config.cluster.gpus_per_node,
        "trainer.total_training_steps": config.train.steps,
        "trainer.total_epochs": 1_000_000,  # total_training_steps ends the run
        "trainer.project_name": "retool",
        "trainer.experiment_name": "verl_bench",
        "trainer.logger": ["console", "file"],
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.resume_mode": "disable",
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
    }


def hydra_words(keys: Mapping[str, Any]) -> list[str]:
    """Command-line overrides for Hydra. Strings, lists, numbers and null are written as JSON.

    A table becomes one override per key, because Hydra's tables cannot have quoted keys.
    """
    words: list[str] = []
    for name, value in keys.items():
        if isinstance(value, Mapping):
            words += hydra_words({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            words.append(f"++{name}={json.dumps(value)}")
    return words


def read_steps(path: Path, num_gpus: int) -> list[dict[str, float]]:
    """Rows of verl's log, under verl's names and under those of run/metric_table.py."""
    lines = read_metrics(path) if path.exists() else []
    logged: list[dict[str, Any]] = [{"step": line["step"], **line["data"]} for line in lines]  # type: ignore[dict-item]
    rows: list[dict[str, float]] = []
    for row in logged:
        if "timing_s/step" not in row:
            continue
        ours = {"timing_s/other": row["timing_s/step"] - sum(row[f"timing_s/{name}"] for name in PHASES)}
        ours |= {"memory_gib": row[MEMORY]} if MEMORY in row else {}
        rows.append({**row, **ours, **token_rates(row["perf/total_num_tokens"], row, num_gpus)})
    return rows


if __name__ == "__main__":
    typer.run(bench)
