"""Samples many trajectories from one SGLang server and writes each one as it finishes."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retool_mcore.rollout.engine import Sampling
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import run_trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.protocol import ToolProtocol
from retool_mcore.rollout.records import record, tokens
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.sandbox import open_sandbox


async def sample_prompts(
    prompts: Sequence[Sequence[Mapping[str, Any]]],
    out: Path,
    *,
    url: str,
    protocol: ToolProtocol,
    limits: Limits,
    sampling: Sampling,
    n: int,
    concurrency: int,
    sandbox: Sequence[str],
) -> int:
    """Sample ``n`` trajectories per prompt and write each as one JSON line to ``out``.

    ``sandbox``: where the interpreter runs; empty without the tool. Returns the number of
    trajectories dropped by outages.
    """
    slots = asyncio.Semaphore(concurrency)
    async with contextlib.AsyncExitStack() as stack:
        file = stack.enter_context(out.open("w", encoding="ascii"))
        engine = await stack.enter_async_context(SglangEngine(url))
        box = await stack.enter_async_context(open_sandbox(sandbox, min_level="rlimits")) if sandbox else None

        async def sample(index: int, number: int) -> bool:
            async with slots:
                trajectory = await run_trajectory(
                    protocol.prompt_ids(prompts[index]),
                    engine=engine,
                    sandbox=box,
                    protocol=protocol,
                    limits=limits,
                    sampling=sampling,
                    trajectory_id=f"{index}-{number}",
                )
            row = {
                "prompt": index,
                "sample": number,
                "behavior": None if trajectory.dropped else Behavior.of(trajectory).to_json(),
                **record(trajectory),
                **tokens(trajectory),
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
            return trajectory.dropped

        return sum(
            await asyncio.gather(*(sample(index, number) for index in range(len(prompts)) for number in range(n)))
        )
