"""Samples n trajectories per problem, grades them with the reward, and computes the report.

It uses RL's rollout loop. Each finished sample is appended to ``samples.jsonl``, from which an
interrupted evaluation resumes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from retool_mcore.config import EvaluationConfig
from retool_mcore.config.base import is_table
from retool_mcore.data.files import replacing
from retool_mcore.data.tokenizer import template_of
from retool_mcore.errors import ConfigError, RolloutError
from retool_mcore.evaluate.problems import Problem
from retool_mcore.evaluate.stats import Samples, summarize
from retool_mcore.reward.statement import vote
from retool_mcore.rollout.engine import Sampling, trajectory_seed
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.metrics import summarize as summarize_behavior
from retool_mcore.rollout.records import record, tokens
from retool_mcore.rollout.tools import ToolContext
from retool_mcore.sandbox.base import Sandbox

TRIES = 2  # attempts per sample if outages drop it
Judge = Callable[[Trajectory, Problem, str], Awaitable[bool]]  # whether the answer is correct; str: the response


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with one setting. ``name`` is also the name of its output folder."""

    name: str
    model: str
    tool: bool = True


def identity_of(
    config: EvaluationConfig, case: Case, problems: Sequence[Problem], endpoint: str | None = None
) -> dict[str, Any]:
    """Everything that affects a sample of ``case``: settings, weights, problems and judge.

    The number of samples per problem is not part of it. Each sample has its own seed, so a larger n
    only adds samples.
    """
    rollout, with_tools = config.rollout.with_tools(case.tool), config.rollout.with_tools(True)
    weights = sorted(Path(case.model).glob("*.safetensors"))
    text = json.dumps([[problem.messages, problem.truth] for problem in problems])
    return {
        **({"endpoint": endpoint} if endpoint else {}),
        "model": case.model,
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
        "problems": hashlib.sha256(text.encode()).hexdigest(),
        **({"reward.function": config.reward.function} if config.reward.function else {}),
        **({"template": template} if (template := template_of(config.model)) else {}),
        "limits": asdict(Limits.of(rollout, config.sandbox)),
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "protocol": rollout.protocol,
        "calls_per_turn": rollout.calls_per_turn,
        "tool": case.tool,
        "tools": with_tools.tools,
        "mcp": {name: server.model_dump() for name, server in with_tools.mcp.items()},
        "sampling": {"temperature": config.validation.temperature, "top_p": config.validation.top_p},
        "seed": config.run.seed,
    }


class SampleFile:
    """The finished samples of one evaluation, appended to samples.jsonl as they finish."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / "samples.jsonl"
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / "settings.json"
        wanted = json.loads(json.dumps(identity))
        if mark.exists():
            for name, old, new in _differences(json.loads(mark.read_text(encoding="utf-8")), wanted):
                raise ConfigError(
                    f"{folder} has an evaluation with {name} = {old!r}, but this one has {new!r}. "
                    "Name another folder in --out, or remove that folder"
                )
        else:
            with replacing(mark) as draft:
                Path(draft).write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        complete_bytes = 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # a partial line, because a kill interrupted a write
                row = json.loads(line)
                self.rows[row["problem"], row["sample"]] = row
                complete_bytes += len(line)
        os.truncate(self.path, complete_bytes)

    def append(self, row: dict[str, Any]) -> None:
        self.rows[row["problem"], row["sample"]] = row
        with open(self.path, "a", encoding="ascii") as file:
            file.write(json.dumps(row) + "\n")


class Sampler(Protocol):
    """Samples trajectories of one model, on tokens or on text."""

    async def trajectory(self, problem: Problem, sampling: Sampling, context: ToolContext) -> Trajectory:
        """Sample one trajectory. An outage or a tool's exception drops it."""
        ...

    def text(self, trajectory: Trajectory) -> str:
        """The response text for the judge."""
        ...


@dataclass(frozen=True, kw_only=True)
class CaseSamples:
    """A case with its settings, problems and sample file. ``n``: samples per problem."""

    case: Case
    config: EvaluationConfig
    problems: Sequence[Problem]
    n: int
    samples: SampleFile

    @property
    def limits(self) -> Limits:
        return Limits.of(self.config.rollout.with_tools(self.case.tool), self.config.sandbox)

    def sampling(self, problem: Problem, sample: int) -> Sampling:
        validation = self.config.validation
        seed = trajectory_seed(self.config.run.seed, problem.id, sample)
        return Sampling(temperature=validation.temperature, top_p=validation.top_p, seed=seed)

    @cached_property
    def missing(self) -> list[tuple[Problem, int]]:
        """(problem, sample index) of each sample that was not in the file at first access."""
        wanted = [(problem, sample) for problem in self.problems for sample in range(self.n)]
        return [(problem, sample) for problem, sample in wanted if (problem.id, sample) not in self.samples.rows]


async def sample_all(
    jobs: Sequence[tuple[CaseSamples, Sampler]],
    *,
    judge: Judge,
    sandbox: Sandbox | None,
    concurrency: int,
    on_sample: Callable[[str, bool], None] = lambda name, correct: None,
) -> None:
    """Sample, grade and store the missing samples of all jobs concurrently.

    At most ``concurrency`` samples are in flight. The jobs' samples are interleaved, so that the
    engine works on one job while another waits for the interpreter. Raises RolloutError if outages
    or a tool's exceptions dropped a sample TRIES times; finished samples stay in the files.
    """
    slots = asyncio.Semaphore(concurrency)
    dropped: list[str] = []

    async def sample_one(work: CaseSamples, sampler: Sampler, problem: Problem, sample: int) -> None:
        name = work.case.name
        context = ToolContext(
            trajectory_id=f"{name}/{problem.id}-{sample}",
            truth=problem.truth,
            sandbox=sandbox if work.case.tool else None,
        )
        async with slots:
            error: str | None = None
            for _ in range(TRIES):
                trajectory = await sampler.trajectory(problem, work.sampling(problem, sample), context)
                if not trajectory.dropped:
                    correct = await judge(trajectory, problem, sampler.text(trajectory))
                    work.samples.append(_row(problem, sample, trajectory, correct))
                    on_sample(name, correct)
                    return
                error = trajectory.drop_error
            dropped.append(f"{name}, problem {problem.id}, sample {sample}: {error}")

    todo = [(at, work, sampler, pair) for work, sampler in jobs for at, pair in enumerate(work.missing)]
    todo.sort(key=itemgetter(0))
    await asyncio.gather(*(sample_one(work, sampler, problem, sample) for _, work, sampler, (problem, sample) in todo))
    if dropped:
        raise RolloutError(
            f"{len(dropped)} of {len(todo)} samples were dropped {TRIES} times; the first: {dropped[0]}. "
            "Remove the cause and run the same command again: finished samples are kept in "
            f"{', '.join(str(work.samples.path) for work, _ in jobs)}"
        )


def make_report(work: CaseSamples) -> dict[str, Any]:
    """The report of a finished evaluation: scores, behaviour metrics, and results per problem."""
    rows = [[work.samples.rows[problem.id, sample] for sample in range(work.n)] for problem in work.problems]
    flat = [row for samples in rows for row in samples]
    scores = summarize(
        [
            Samples(
                scores=[float(row["correct"]) for row in samples], votes=[vote(row["extracted"]) for row in samples]
            )
            for samples in rows
        ]
    )
    behaviors = [Behavior(**row["behavior"]) for row in flat]
    return {
        "problems": len(work.problems),
        "n": work.n,
        "tool": work.case.tool,
        "protocol": work.config.rollout.with_tools(work.case.tool).protocol,
        "accuracy": scores[f"mean@{work.n}"],
        "scores": scores,
        "behavior": summarize_behavior(behaviors, [row["correct"] for row in flat]),
        "per_problem": [
            {
                "id": problem.id,
                "truth": problem.truth,
                "correct": [row["correct"] for row in samples],
                "extracted": [row["extracted"] for row in samples],
            }
            for problem, samples in zip(work.problems, rows, strict=True)
        ],
    }


def _row(problem: Problem, sample: int, trajectory: Trajectory, correct: bool) -> dict[str, Any]:
    return {
        "problem": problem.id,
        "sample": sample,
        "truth": problem.truth,
        "correct": correct,
        "behavior": Behavior.of(trajectory).to_json(),
        **record(trajectory),
        **(tokens(trajectory) if trajectory.ledger.response_ids else {}),  # an API returns no tokens
    }


def _differences(
    before: Mapping[str, Any], wanted: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*before, *wanted}):
        old, new = before.get(name), wanted.get(name)
        if is_table(old) and is_table(new):
            yield from _differences(old, new, f"{path}{name}.")
        elif old != new:
            yield f"{path}{name}", old, new
