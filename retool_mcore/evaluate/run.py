"""Evaluates a model: n trajectories of each problem, judged as the reward judges.

The trajectories go through the loop that RL trains with. Finished samples are appended to
``samples.jsonl``; a stopped evaluation continues from there.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from retool_mcore.config import EvaluationConfig
from retool_mcore.config.base import is_table
from retool_mcore.data.files import replacing
from retool_mcore.errors import ConfigError, RolloutError
from retool_mcore.evaluate.problems import Problem
from retool_mcore.evaluate.stats import Samples, summarize
from retool_mcore.reward.said import vote
from retool_mcore.rollout.engine import Engine, Sampling, trajectory_seed
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory, run_trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.metrics import summarize as summarize_behavior
from retool_mcore.rollout.protocol import ToolProtocol, checked_prompt
from retool_mcore.rollout.records import record, tokens
from retool_mcore.rollout.tools import Given
from retool_mcore.sandbox.base import Sandbox

TRIES = 2  # of one sample, if outages drop it

Judge = Callable[[Trajectory, Problem], Awaitable[bool]]  # is the trajectory's answer right


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes two evaluations comparable.

    ``n``: samples per problem; ``concurrency``: trajectories in flight.
    """

    limits: Limits
    max_prompt_tokens: int
    n: int
    protocol: str
    calls_per_turn: str
    tool: bool
    tools: tuple[str, ...]
    mcp: Mapping[str, Any]
    sampling: Sampling
    seed: int
    concurrency: int

    @classmethod
    def of(
        cls, config: EvaluationConfig, n: int, tool: bool, servers: int = 1, concurrency: int | None = None
    ) -> Settings:
        """n samples per problem, sampled as ``config`` says, with or without the tool."""
        rollout, offered = config.rollout.calling(tool), config.rollout.calling(True)
        return cls(
            limits=Limits.of(rollout, config.sandbox),
            max_prompt_tokens=config.data.max_prompt_tokens,
            n=n,
            protocol=rollout.protocol,
            calls_per_turn=rollout.calls_per_turn,
            tool=tool,
            tools=tuple(offered.tools),
            mcp={name: server.model_dump() for name, server in offered.mcp.items()},
            sampling=Sampling(temperature=config.validation.temperature, top_p=config.validation.top_p),
            seed=config.run.seed,
            # By default half of them may wait for the interpreter.
            concurrency=concurrency or 2 * rollout.max_running_requests * servers,
        )

    def identity(self) -> dict[str, Any]:
        """All settings that change a sample, which neither ``n`` nor ``concurrency`` does.

        Each sample has a seed of its own, so a larger n adds samples to an evaluation.
        """
        return {name: value for name, value in asdict(self).items() if name not in ("n", "concurrency")}


class SampleFile:
    """The finished samples of one evaluation, written to disk as they finish."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / "samples.jsonl"
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / "settings.json"
        wanted = json.loads(json.dumps(identity))
        if mark.exists():
            _require_same(json.loads(mark.read_text(encoding="utf-8")), wanted, folder)
        else:
            with replacing(mark) as draft:
                Path(draft).write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        whole = 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # cut off by a kill in the middle of a write
                row = json.loads(line)
                self.rows[row["problem"], row["sample"]] = row
                whole += len(line)
        os.truncate(self.path, whole)

    def append(self, row: dict[str, Any]) -> None:
        self.rows[row["problem"], row["sample"]] = row
        with open(self.path, "a", encoding="ascii") as file:
            file.write(json.dumps(row) + "\n")


async def sample_all(
    problems: Sequence[Problem],
    settings: Settings,
    *,
    engine: Engine,
    sandbox: Sandbox | None,
    protocol: ToolProtocol,
    judge: Judge,
    samples: SampleFile,
    on_sample: Callable[[bool], None],
) -> None:
    """Sample what is not in ``samples`` yet, judge it, and append it there.

    ``on_sample`` is called with each new verdict. Raises DataError for a prompt that is too long,
    and RolloutError when outages dropped a sample twice; finished samples stay in the file.
    """
    limit = settings.max_prompt_tokens
    prompts = {each.id: checked_prompt(protocol, each.messages, limit, f"problem {each.id}") for each in problems}

    async def one(problem: Problem, sample: int) -> Trajectory:
        return await run_trajectory(
            prompts[problem.id],
            engine=engine,
            sandbox=sandbox,
            protocol=protocol,
            limits=settings.limits,
            sampling=seeded(settings, problem, sample),
            trajectory_id=f"{problem.id}-{sample}",
            given=Given(truth=problem.truth),
        )

    await sample_each(problems, settings, one, judge=judge, samples=samples, on_sample=on_sample)


async def sample_each(
    problems: Sequence[Problem],
    settings: Settings,
    trajectory_of: Callable[[Problem, int], Awaitable[Trajectory]],
    *,
    judge: Judge,
    samples: SampleFile,
    on_sample: Callable[[bool], None],
) -> None:
    """``sample_all`` with whatever makes a trajectory of a problem and the number of a sample."""
    slots = asyncio.Semaphore(settings.concurrency)
    dropped: list[str] = []

    async def one(problem: Problem, sample: int) -> None:
        async with slots:
            error: str | None = None
            for _ in range(TRIES):
                trajectory = await trajectory_of(problem, sample)
                if not trajectory.dropped:
                    correct = await judge(trajectory, problem)
                    samples.append(_row(problem, sample, trajectory, correct))
                    on_sample(correct)
                    return
                error = trajectory.drop_error
            dropped.append(f"problem {problem.id}, sample {sample}: {error}")

    todo = [(p, k) for p in problems for k in range(settings.n) if (p.id, k) not in samples.rows]
    await asyncio.gather(*(one(problem, sample) for problem, sample in todo))
    if dropped:
        raise RolloutError(
            f"{len(dropped)} of {len(todo)} samples were dropped {TRIES} times by an outage; the first: {dropped[0]}. "
            f"Mend it and run the same command again: {len(samples.rows)} finished samples are kept in {samples.path}"
        )


def make_report(problems: Sequence[Problem], settings: Settings, samples: SampleFile) -> dict[str, Any]:
    """Scores, behaviour and the matrix of verdicts of a finished evaluation."""
    rows = [[samples.rows[problem.id, sample] for sample in range(settings.n)] for problem in problems]
    flat = [row for each in rows for row in each]
    scores = summarize(
        [
            Samples(scores=[float(row["correct"]) for row in each], votes=[vote(row["answer"]) for row in each])
            for each in rows
        ]
    )
    behaviors = [Behavior(**row["behavior"]) for row in flat]
    return {
        "problems": len(problems),
        "n": settings.n,
        "tool": settings.tool,
        "protocol": settings.protocol,
        "accuracy": scores[f"mean@{settings.n}"],
        "scores": scores,
        "behavior": summarize_behavior(behaviors, [row["correct"] for row in flat]),
        "per_problem": [
            {
                "id": problem.id,
                "truth": problem.truth,
                "correct": [row["correct"] for row in each],
                "answers": [row["answer"] for row in each],
            }
            for problem, each in zip(problems, rows, strict=True)
        ],
    }


def seeded(settings: Settings, problem: Problem, sample: int) -> Sampling:
    return replace(settings.sampling, seed=trajectory_seed(settings.seed, problem.id, sample))


def _row(problem: Problem, sample: int, trajectory: Trajectory, correct: bool) -> dict[str, Any]:
    return {
        "problem": problem.id,
        "sample": sample,
        "truth": problem.truth,
        "correct": correct,
        "behavior": Behavior.of(trajectory).to_json(),
        **record(trajectory),
        **(tokens(trajectory) if trajectory.ledger.response_ids else {}),  # an API tells none
    }


def _require_same(before: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    for name, old, new in _differences(before, wanted):
        raise ConfigError(
            f"{folder} holds an evaluation with {name} = {old!r}, and this one has {new!r}. "
            "Give another --out, or remove the folder"
        )


def _differences(
    before: Mapping[str, Any], wanted: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*before, *wanted}):
        old, new = before.get(name), wanted.get(name)
        if is_table(old) and is_table(new):
            yield from _differences(old, new, f"{path}{name}.")
        elif old != new:
            yield f"{path}{name}", old, new
