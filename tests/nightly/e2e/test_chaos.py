"""The engine and the sandbox are killed in the middle of a rollout and come back: every trajectory
ends as planned.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.protocol import Hermes
from retool_mcore.rollout.server import SglangServer, free_port
from retool_mcore.sandbox import open_sandbox
from tests.engine.scripted_server import PlannedEngine, make_plan
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import roll_out

TRAJECTORIES, CALLS = 16, 3
QUESTION = [{"role": "user", "content": "Count."}]


def turns_of(index: int) -> tuple[list[str], list[str]]:
    numbers = [str(100 * index + call) for call in range(CALLS)]
    code = "import time\\ntime.sleep(0.1)\\nprint({})"
    body = '<tool_call>\n{{"name": "code_interpreter", "arguments": {{"code": "{}"}}}}\n</tool_call>'
    calls = [body.format(code.format(number)) for number in numbers]
    return [*calls, f"\\boxed{{{index}}}<|im_end|>"], numbers


@contextlib.contextmanager
def sandbox_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "retool_mcore", "sandbox", "serve", "--port", str(port), "--min-level", "rlimits"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=300)


@pytest.mark.long
async def test_both_are_killed_and_nothing_is_lost(
    model_dir: Path, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a secret")  # both servers have the key that follows from it
    engine_port, sandbox_port = free_port(), free_port()

    def sglang(name: str) -> SglangServer:
        return SglangServer(
            model_dir,
            get_platform("cpu"),
            dtype="float32",
            log_path=tmp_path / f"{name}.log",
            extra_args=["--skip-tokenizer-init", "--enable-custom-logit-processor"],
            port=engine_port,
            max_running_requests=64,
        )

    hermes = Hermes(tokenizer)
    prompt = hermes.prompt_ids(QUESTION)
    plans = [make_plan(hermes, *turns_of(index)) for index in range(TRAJECTORIES)]
    with contextlib.ExitStack() as stack:
        box = stack.enter_context(sandbox_server(sandbox_port))
        first = stack.enter_context(sglang("first"))
        engines = [PlannedEngine(first.url, len(prompt), plan, retry_s=300.0) for plan in plans]
        sandbox = open_sandbox(f"http://127.0.0.1:{sandbox_port}", min_level="rlimits")
        limits = limits_for(max_response_tokens=800, max_turns=CALLS + 1)

        async def kill_both() -> None:
            while sum(engine.turns for engine in engines) < TRAJECTORIES // 2:
                await asyncio.sleep(0.02)
            box.kill()
            os.killpg(first.pid, signal.SIGKILL)
            stack.enter_context(sandbox_server(sandbox_port))
            await asyncio.to_thread(stack.enter_context, sglang("second"))

        async with sandbox:
            runs = [
                roll_out(prompt, engine, sandbox, hermes, limits, trajectory_id=str(index))
                for index, engine in enumerate(engines)
            ]
            trajectories, _ = await asyncio.gather(asyncio.gather(*runs), kill_both())
    assert (tmp_path / "second.log").exists(), "the rollout ended before anything was killed"
    assert [each.drop_error for each in trajectories] == [None] * TRAJECTORIES
    for index, (trajectory, plan) in enumerate(zip(trajectories, plans, strict=True)):
        assert trajectory.ledger.response_ids == plan
        assert (trajectory.stop_reason, trajectory.answer) == (StopReason.FINISHED, str(index))
        assert [result.shown for turn in trajectory.turns for result in turn.results] == turns_of(index)[1]
