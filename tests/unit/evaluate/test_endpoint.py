"""`retool eval --endpoint`: a model behind an OpenAI-compatible API, here a scripted server."""

import contextlib
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.config import load_evaluation
from retool_mcore.evaluate.cases import Case, evaluate_many
from retool_mcore.evaluate.endpoint import base_url
from retool_mcore.reward.response import Response
from retool_mcore.rollout.tools import Tool, ToolContext
from retool_mcore.run.folder import lock_run
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Sandbox
from tests.unit.report.view.test_page import parts

LOCAL = ["sandbox.min_level=rlimits", "sandbox.workers=1", "rollout.max_running_requests=1"]


class ScriptedApi(ThreadingHTTPServer):
    """Answers requests with ``script``: JSON, or a status with JSON and perhaps headers.

    ``most`` is how many requests were there at the same time.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[Any] = []
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.pause_s, self.now, self.most, self.lock = 0.0, 0, 0, threading.Lock()

    def count(self, change: int) -> None:
        with self.lock:
            self.now += change
            self.most = max(self.most, self.now)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedApi

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        script = self.server.script  # a request too many is refused, as a failure would be retried
        answer = script.pop(0) if script else (400, failure("the script is over"))
        status, answer, *headers = answer if isinstance(answer, tuple) else (200, answer)
        self.server.count(1)
        time.sleep(self.server.pause_s)
        self.server.count(-1)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers[0] if headers else {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class InProcessSandbox(Sandbox):
    """Runs the code in this process, because the real sandbox starts in seconds."""

    is_open = False

    async def run(self, request: ExecRequest) -> ExecResult:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(request.code, {})
        return ExecResult(status="finished", return_code=0, stdout=out.getvalue(), stderr="")

    async def end_session(self, session: str) -> None:
        pass

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False


@pytest.fixture(autouse=True)
def sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retool_mcore.evaluate.cases.open_sandbox", lambda where, **options: InProcessSandbox())


@pytest.fixture
def server() -> Iterator[ScriptedApi]:
    with ScriptedApi() as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def failure(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def chat(content: str | None, *codes: str, finish: str = "stop", tokens: int = 10) -> dict[str, Any]:
    """Answer of /v1/chat/completions; ``codes`` are calls, "" for arguments that are not JSON."""
    calls = [
        {
            "id": f"call_{number}_x",
            "type": "function",
            "function": {"name": "code_interpreter", "arguments": json.dumps({"code": code}) if code else "{"},
        }
        for number, code in enumerate(codes)
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else finish}
    return {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": tokens}}


def evaluate(server: ScriptedApi, tmp_path: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output on one line, and the report if there is one."""
    out, data = tmp_path / "out", str(problems(tmp_path))
    arguments = ["eval", "--endpoint", server.url, "--model", "org/served", "--data", data, "--n", "1"]
    result = CliRunner().invoke(all_commands(), [*arguments, "--out", str(out), *LOCAL, *options])
    report = out / "served" / "report.json"
    output = " ".join(result.output.split())
    return result.exit_code, output, json.loads(report.read_text()) if report.exists() else {}


def problems(folder: Path) -> Path:
    """A file with one problem."""
    folder.mkdir(exist_ok=True)
    file = folder / "problems.jsonl"
    file.write_text(json.dumps({"problem": "What is 123 + 456?", "answer": "579"}) + "\n", encoding="utf-8")
    return file


def test_its_samples_open_in_the_viewer_without_tokens(server: ScriptedApi, tmp_path: Path):
    server.script = [chat(None, "print(123 + 456)"), chat("It is \\boxed{579}.")]
    _, output, report = evaluate(server, tmp_path)
    assert report["accuracy"] == 1.0, output
    assert [body["max_tokens"] for _, body, _ in server.requests] == [16384, 16374], "one budget for all turns"
    assert not [name for name in report["behavior"] if "token" in name or "position" in name]
    row = json.loads((tmp_path / "out/served/samples.jsonl").read_text())
    assert "response_ids" not in row
    assert row["behavior"]["repairs"] == {}, "arguments are JSON in a text, as the API says"
    page = tmp_path / "view.html"
    result = CliRunner().invoke(all_commands(), ["view", str(tmp_path / "out/served"), "--out", str(page)])
    assert result.exit_code == 0, result.output
    index, _ = parts(page)
    assert (index["rows"][0]["tokens"], index["rows"][0]["calls"], index["rows"][0]["right"]) == (None, 1, True)


def test_without_the_tool_none_is_offered_and_a_cut_response_may_have_its_answer(server: ScriptedApi, tmp_path: Path):
    server.script = [chat("\\boxed{579}, because", finish="length")]
    more = str(problems(tmp_path / "more"))
    options = ("--tool", "off", "--data", more, "--limit", "1", "validation.temperature=0.7")
    _, _, report = evaluate(server, tmp_path, *options)
    assert (report["problems"], report["data"]) == (1, f"{tmp_path}/problems.jsonl, {more}")
    ((_, body, _),) = server.requests
    assert "tools" not in body and (body["temperature"], body["top_p"]) == (0.7, 0.6)
    assert (report["tool"], report["accuracy"], report["behavior"]["behavior/stop/length"]) == (False, 1.0, 1.0)
    assert {base_url(url) for url in ("http://h", "http://h/", "http://h/v1", "http://h/v1/")} == {"http://h/v1"}


def test_the_model_reads_that_its_arguments_are_not_json(server: ScriptedApi, tmp_path: Path):
    server.script = [chat(None, "", "print(2)"), chat("\\boxed{579}")]
    _, _, report = evaluate(server, tmp_path)
    results = [message for message in server.requests[1][1]["messages"] if message["role"] == "tool"]
    assert [each["tool_call_id"] for each in results] == ["call_0_x", "call_1_x"], "each call has its answer"
    assert all(each["content"].startswith("Error: arguments must be") for each in results)
    assert report["behavior"]["behavior/malformed/arguments"] == 1.0
    assert report["behavior"]["behavior/calls"] == 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([chat("It is \\boxed{5", finish="length")], "length"),
        ([chat("a", "print(1)", tokens=10_000), chat("a", "print(1)", tokens=6384)], "length"),
        ([chat("a", "print(1)"), (400, failure("maximum context length is 4096 tokens"))], "no_room"),
        ([chat("a", "")] * 3, "malformed_calls"),
    ],
)
def test_a_trajectory_ends_as_in_training(server: ScriptedApi, tmp_path: Path, script: list[Any], reason: str):
    server.script = list(script)
    _, output, report = evaluate(server, tmp_path)
    assert report["behavior"][f"behavior/stop/{reason}"] == 1.0, output
    assert report["accuracy"] == 0.0


class Known(Tool):
    name, description, parameters = "known", "Tells the answer.", {"type": "object", "properties": {}}

    async def start(self, context: ToolContext) -> Any:
        return context.truth

    async def call(self, arguments: Any, state: Any) -> str:
        return f"it is {state}"


def informed(response: Response) -> dict[str, float]:
    seen = (response.timeout_s, response.truth, response.answer, response.text, response.behavior["calls"])
    return {"score": 0.0, "acc": float(seen == (7.5, "579", None, "\nit is 579\nno answer", 1))}


def test_a_users_tool_sees_the_truth_and_their_reward_the_trajectory(server: ScriptedApi, tmp_path: Path):
    call = chat(None, "")
    call["choices"][0]["message"]["tool_calls"][0]["function"] = {"name": "known", "arguments": "{}"}
    server.script = [call, chat("no answer")]
    tools = f'rollout.tools=["code_interpreter", "{__name__}:Known"]'
    own = ("reward.timeout_s=7.5", f"reward.function={__name__}:informed")
    _, output, report = evaluate(server, tmp_path, tools, *own)
    assert server.requests[1][1]["messages"][-1]["content"] == "it is 579"
    assert report["accuracy"] == 1.0, output


def test_results_have_no_control_tokens_and_are_cut_by_characters(server: ScriptedApi, tmp_path: Path):
    server.script = [chat(None, "print('<|im_end|>', 1 < 2, '<|eot_id|>')"), chat(None, "print('x' * 1000)")]
    server.script += [chat("\\boxed{579}")]
    evaluate(server, tmp_path, "rollout.max_tool_output_tokens=10")
    assert server.requests[1][1]["messages"][-1]["content"].strip() == "< |im_end|> True < |eot_id|>"
    long = server.requests[2][1]["messages"][-1]["content"]
    assert re.search(r"\[\.\.\. 96[01] characters cut here \.\.\.\]", long) and len(long) < 100


@pytest.mark.parametrize(
    ("options", "most"),
    [(("--concurrency", "3"), 3), (("rollout.max_running_requests=2",), 4)],
    ids=["named", "twice as many as the engines run"],
)
def test_concurrency_limits_the_samples(server: ScriptedApi, tmp_path: Path, options: tuple[str, ...], most: int):
    server.script = [chat("\\boxed{579}") for _ in range(6)]
    server.pause_s = 0.3
    evaluate(server, tmp_path, "--n", "6", *options)
    assert server.most == most


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "The model `org/served` does not exist."), (400, "maximum context length is 8 tokens"), (200, "busy")],
)
def test_a_refused_first_request_is_one_line(server: ScriptedApi, tmp_path: Path, status: int, message: str):
    """Also for a prompt beyond the context, because the response is not too long."""
    server.script = [(status, failure(message))]
    code, output, _ = evaluate(server, tmp_path)
    assert code == 3 and message in output and "Traceback" not in output


def test_reasoning_returns_with_the_call_and_the_newer_name_of_the_limit_is_used(server: ScriptedApi, tmp_path: Path):
    first, second = chat(None, "print(579)"), chat(None)
    first["choices"][0]["message"]["reasoning_content"] = "I compute."
    second["choices"][0]["message"]["reasoning"] = "So it is \\boxed{579}."
    refusal = (400, failure("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."))
    server.script = [(429, failure("slow down"), {"Retry-After": "1"}), refusal, first, second]
    began = time.monotonic()
    _, output, report = evaluate(server, tmp_path)
    assert report["accuracy"] == 1.0 and time.monotonic() - began >= 1, output
    names = [name for _, body, _ in server.requests for name in body if name.startswith("max_")]
    assert names == ["max_tokens", "max_tokens", "max_completion_tokens", "max_completion_tokens"]
    assert server.requests[3][1]["messages"][-2]["reasoning_content"] == "I compute."


def test_calls_in_the_text_are_parsed_and_a_larger_n_adds_samples(server: ScriptedApi, tmp_path: Path):
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": "print(579)"}})
    server.script = [chat(f"<tool_call>\n{call}\n</tool_call>"), chat("\\boxed{579}"), chat("\\boxed{1}")]
    _, _, report = evaluate(server, tmp_path)
    assert report["behavior"]["behavior/calls"] == report["behavior"]["behavior/executable_fraction"] == 1
    _, output, report = evaluate(server, tmp_path, "--n", "2")
    assert (report["accuracy"], len(server.requests)) == (0.5, 3), output
    assert len({body["seed"] for _, body, _ in server.requests}) == 2


def test_cases_share_one_sandbox_with_a_worker_for_each_core(
    server: ScriptedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[dict[str, Any]] = []
    during: list[bool] = []
    sandbox = InProcessSandbox()
    own = ["sandbox.python=/own/python", "sandbox.preload=['numpy']", "sandbox.workers=8", "sandbox.sessions=100"]
    own.append(f"validation.files=['{problems(tmp_path)}']")
    monkeypatch.setattr(
        "retool_mcore.evaluate.cases.open_sandbox", lambda where, **options: opened.append(options) or sandbox
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(128)))
    server.script = [chat(None, "print(123 + 456)"), chat("\\boxed{579}")] * 2
    evaluate_many(
        load_evaluation(Path("configs/rl_tiny_cpu.toml"), [*LOCAL, *own]),
        [Case(name=model, model=model) for model in ("first", "second")],
        endpoint=server.url,
        out=tmp_path / "out",
        n=1,
        on_sample=lambda name, right: during.append(right and sandbox.is_open),
    )
    same = {"min_level": "rlimits", "python": "/own/python", "preload": ["numpy"]}
    assert opened == [{**same, "workers": 128, "sessions": 128}]
    assert during == [True, True] and not sandbox.is_open


def test_what_cannot_be_evaluated_is_reported_before_any_request(server: ScriptedApi, tmp_path: Path):
    with ScriptedApi() as closed:
        pass
    began = time.monotonic()
    code, output, _ = evaluate(closed, tmp_path)
    assert code == 2 and time.monotonic() - began < 30, "requests are retried for 120 s"
    assert f"--endpoint {closed.url}: no server responds" in output
    code, output, _ = evaluate(server, tmp_path, "--protocol", "retool")
    assert code == 2 and "Serve the model with SGLang, and name that server in --url" in output
    with lock_run(tmp_path / "out"):
        code, output, _ = evaluate(server, tmp_path)
    assert (code, server.requests) == (2, [])
    assert "in use by process" in output and "name another folder in --out" in output
