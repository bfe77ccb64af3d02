"""Samples many trajectories from one SGLang server and writes each one as it finishes."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.rollout.engine import Sampling
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import run_trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.protocol import open_protocol
from retool_mcore.rollout.records import record, tokens
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples ``n`` trajectories per prompt from the server at ``url``.

    At most ``concurrency`` trajectories run at a time.
    """

    url: str
    model: str
    chat_template: str = ""
    template_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    protocol: str
    tool: bool
    calls: Literal["first", "all"]
    n: int
    concurrency: int
    sandbox: Sequence[str]
    sampling: Sampling
    limits: Limits

    async def run(self, prompts: Sequence[Sequence[Mapping[str, Any]]], out: Path) -> int:
        """Run all trajectories and write each as one JSON line to ``out``.

        Returns the number of trajectories dropped by outages.
        """
        tokenizer = load_tokenizer(self.model, self.chat_template, self.template_args)
        protocol = open_protocol(self.protocol, tokenizer, tool=self.tool, calls=self.calls)
        slots = asyncio.Semaphore(self.concurrency)
        dropped = 0
        async with contextlib.AsyncExitStack() as stack:
            file = stack.enter_context(out.open("w", encoding="ascii"))
            engine = await stack.enter_async_context(SglangEngine(self.url))
            box: Sandbox | None = None
            if self.tool:
                box = await stack.enter_async_context(open_sandbox(self.sandbox, min_level="rlimits"))

            async def one(index: int, sample: int) -> None:
                nonlocal dropped
                async with slots:
                    trajectory = await run_trajectory(
                        protocol.prompt_ids(prompts[index]),
                        engine=engine,
                        sandbox=box,
                        protocol=protocol,
                        limits=self.limits,
                        sampling=self.sampling,
                        trajectory_id=f"{index}-{sample}",
                    )
                dropped += trajectory.dropped
                row = {
                    "prompt": index,
                    "sample": sample,
                    "behavior": None if trajectory.dropped else Behavior.of(trajectory).to_json(),
                    **record(trajectory),
                    **tokens(trajectory),
                }
                file.write(json.dumps(row) + "\n")
                file.flush()

            await asyncio.gather(*(one(index, sample) for index in range(len(prompts)) for sample in range(self.n)))
        return dropped
