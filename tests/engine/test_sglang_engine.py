"""The loop against the real SGLang server, with a scripted and with a random model."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
import torch

from retool_mcore.data.task_model import write_model
from retool_mcore.errors import RolloutError
from retool_mcore.rollout.engine import Sampling, TurnRequest
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.protocol import Hermes, Retool
from retool_mcore.rollout.server import SglangServer
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.sandbox import open_sandbox
from tests.engine.scripted_server import PlannedEngine, make_plan
from tests.sglang_client import access
from tests.sockets import listening
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import roll_out

QUESTION = [{"role": "user", "content": "What is the sum of the integers from 412 to 967, inclusive?"}]
CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(sum(range(412, 968)))"}}\n</tool_call>'
# The comparison and the other tags only look like the end of a call.
IN_CODE = "I count.\n<code>\n```python\nif 2 > 1:\n    print(sum(range(412, 968)))\n```\n</code>"


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("kind", "turns"),
    [
        (Hermes, [f"I add them up.\n{CALL}", "It is \\boxed{383362}.<|im_end|>"]),
        (Retool, [IN_CODE, "<answer>\n\\boxed{383362}\n</answer><|im_end|>"]),
    ],
)
async def test_a_call_is_intercepted_on_its_last_token_and_the_answer_follows(
    server, tokenizer, kind: type[Hermes | Retool], turns: list[str]
):
    protocol = kind(tokenizer)
    prompt = protocol.prompt_ids(QUESTION)
    plan = make_plan(protocol, turns, ["383362"])
    async with (
        PlannedEngine(server.url, len(prompt), plan) as engine,
        open_sandbox("local", min_level="rlimits") as sandbox,
    ):
        trajectory = await roll_out(prompt, engine, sandbox, protocol, limits_for(max_response_tokens=400))
    call, answer = (ids_of(tokenizer, text) for text in turns)
    assert trajectory.ledger.response_ids == plan
    mask = [1] * len(call) + [0] * (len(plan) - len(call) - len(answer)) + [1] * len(answer)
    assert trajectory.ledger.loss_mask == mask
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.FINISHED, "383362")
    assert [result.shown for turn in trajectory.turns for result in turn.results] == ["383362"]
    assert trajectory.requests == len(trajectory.turns) == 2


async def test_a_tag_that_an_abort_cut_in_two_ends_the_turn(server, tokenizer):
    """Requests of the same turn, the second of which has the start of the tag in its prompt."""
    retool = Retool(tokenizer)
    prompt = retool.prompt_ids(QUESTION)
    plan = ids_of(tokenizer, "<b> if x > 3:\n</code> and so on")
    end = next(end for end in range(1, len(plan)) if "</code>" in tokenizer.decode(plan[:end]))
    for cut in range(1, end):
        async with PlannedEngine(server.url, len(prompt), plan) as engine:
            turn = await engine.generate(
                TurnRequest(
                    token_ids=[*prompt, *plan[:cut]],
                    max_new_tokens=len(plan) - cut,
                    stop_token_ids=retool.stop_token_ids,
                    sampling=Sampling(),
                    trajectory_id="x",
                    call_end=retool.call_end,
                    turn_tokens=cut,
                )
            )
        assert (turn.stop, list(turn.token_ids)) == ("stop", plan[cut:end])


@pytest.mark.long
def test_no_path_of_the_server_answers_without_its_key(server: SglangServer):
    """On each socket that speaks HTTP. SGLang leaves open only what monitors ask for."""
    with httpx.Client(**access(server)) as client:
        routes: dict[str, Any] = client.get("/openapi.json").raise_for_status().json()["paths"]
    asked = [(path, method) for path, methods in routes.items() for method in methods]
    closed = [each for each in asked if not each[0].startswith(("/health", "/metrics"))]
    assert ("/load_lora_adapter_from_tensors", "post") in closed, "it unpickles what it is sent"
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    answers: dict[str, set[int]] = {}
    for address in listening(process.pid for process in processes):
        with suppress(httpx.HTTPError), httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
            answers[address] = {client.request(method, path).status_code for path, method in closed}
    assert answers == {f"127.0.0.1:{server.port}": {401}}


def test_no_other_user_can_read_the_servers_key(server: SglangServer):
    assert server.key not in " ".join(psutil.Process(server.pid).cmdline())
    assert server.key in server.log_path.read_text(encoding="utf-8"), "SGLang writes its arguments there"
    assert server.log_path.stat().st_mode & 0o077 == 0


async def test_replaced_weights_answer_as_a_model_of_their_own(server, model_dir, tokenizer, tmp_path):
    """Greedily, as transformers does with the same weights, and as before when they are back."""
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "other", tokenizer, seed=7)
    prompt, greedy = [5, 6, 7, 8], Sampling(temperature=0.0)
    request = TurnRequest(token_ids=prompt, max_new_tokens=12, stop_token_ids=[], sampling=greedy, trajectory_id="one")

    def alone(folder) -> list[int]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        return model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :].tolist()

    async with SglangEngine(server.url) as engine:
        seen = []
        for version, folder in enumerate((model_dir, tmp_path / "other", model_dir)):
            await engine.load(str(folder), version)
            assert (await engine.model_info())["model_path"] == str(folder)
            turn = await engine.generate(request)
            assert turn.version == version
            seen.append(turn.token_ids)
        with pytest.raises(RolloutError, match="rejected the request"):
            await engine.load(str(model_dir / "missing"))
    assert seen == [alone(model_dir), alone(tmp_path / "other"), seen[0]]
    assert seen[0] != seen[1]


def test_a_killed_owner_leaves_no_server_behind(model_dir, tmp_path):
    code = f"""
        import time
        from pathlib import Path
        from retool_mcore.platforms.base import get_platform
        from retool_mcore.rollout.server import SglangServer
        options = dict(dtype="float32", log_path=Path("server.log"), max_running_requests=64)
        server = SglangServer({str(model_dir)!r}, get_platform("cpu"), **options)
        server.start()
        print(server.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    assert _group_lives(group)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30
    while _group_lives(group):
        assert time.monotonic() < deadline, f"process group {group} still lives 30 s after its owner was killed"
        time.sleep(0.2)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
