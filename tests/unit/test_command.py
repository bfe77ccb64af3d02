"""The `retool` command itself: its version, names of models, where its options arrive."""

import errno
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from retool_mcore.cli.common import guarded
from retool_mcore.cli.evaluate import _cases, _served  # pyright: ignore[reportPrivateUsage]
from retool_mcore.cli.main import all_commands
from retool_mcore.config import SandboxSettings, ToolLoop
from retool_mcore.data.files import read_rows
from retool_mcore.errors import ConfigError, RolloutError, RunError
from retool_mcore.preflight.findings import error, note, ok, warning
from retool_mcore.rollout.engine import Sampling
from retool_mcore.rollout.limits import Limits

RL = str(Path(__file__).parents[2] / "configs/rl_tiny_cpu.toml")
VIEWED = Path(__file__).parents[1] / "report/view/run"


def shown(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(all_commands(), [*words])
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_version_is_that_of_the_installed_package():
    assert shown("--version") == f"retool_mcore {version('retool_mcore')}\n"


@pytest.mark.parametrize(
    ("tool", "models", "cases"),
    [
        ("on", ["a=m/x", "r/export"], [("a", "m/x", True), ("r", "r/export", True)]),
        ("on", ["runs/sft/export/", "./export"], [("sft", "runs/sft/export/", True), ("export", "./export", True)]),
        ("off", ["Qwen/Qwen3-0.6B"], [("Qwen3-0.6B", "Qwen/Qwen3-0.6B", False)]),
        ("both", ["a=m/x"], [("a", "m/x", True), ("a_text", "m/x", False)]),
    ],
)
def test_each_model_is_a_case_with_the_tool_without_it_or_both(tool: str, models: list[str], cases: list[Any]):
    """An export is called as its run."""
    assert [(case.name, case.model, case.tool) for case in _cases(models, tool)] == cases
    with pytest.raises(ConfigError, match="several models are called x"):
        _cases(["m/x", "a=m/y", "n/x"], tool)


def test_a_url_as_the_model_is_its_own_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("retool_mcore.evaluate.cases.model_of_server", lambda url: f"model of {url}")
    assert _served(["http://h:1"], None, None, "") == (["model of http://h:1"], "http://h:1")
    assert _served(["m"], "http://h:1", None, "hermes") == (["m"], "http://h:1")
    with pytest.raises(ConfigError, match="Give only one of them"):
        _served(["m"], "http://h:1", "https://api/v1", "")


def test_scripts_get_values_on_one_line_as_the_command_line_sets_them():
    words = ("get", RL, "cluster.nodes=3", "run.trackers", "cluster.nodes", "optim.lr", "run.platform")
    changed = 'run.trackers=["wandb", "mlflow"]'
    assert shown(*words, changed, "--platform", "cuda") == "wandb mlflow 3 0.0002 cuda\n"


def test_preflight_prints_the_problems_counts_them_and_exits_with_2(monkeypatch: pytest.MonkeyPatch):
    found = [ok("a", "fine"), note("b", "so"), warning("c", "low"), error("d", "none"), error("e", "wrong")]
    scopes: list[tuple[bool, bool, bool, str]] = []

    def checked(run: Any, scope: Any, on_finding: Any) -> Any:
        scopes.append((scope.is_target, scope.thorough, scope.data, scope.platform.name))
        return [on_finding(each) or each for each in found]

    monkeypatch.setattr("retool_mcore.preflight.check.check", checked)
    problems = "2 errors, 1 warning, 1 checks passed"
    said = shown("preflight", RL, code=2)
    assert said.splitlines() == [*map(str, found[2:]), f"{problems}; -v lists them"]
    assert shown("preflight", RL, "-v", "--without-data", code=2).splitlines() == [*map(str, found), problems]
    del found[2:]
    assert shown("preflight", RL, "--platform", "cuda") == "0 errors, 0 warnings, 1 checks passed; -v lists them\n"
    assert scopes == [(True, True, True, "cpu"), (True, True, False, "cpu"), (True, True, True, "cuda")]

    def of_cluster(run: Any, platform: Any, wait_s: float, on_finding: Any) -> Any:
        on_finding(error("nodes", f"{platform.name}, {wait_s:g} s"))
        return [error("nodes", "")]

    monkeypatch.setattr("retool_mcore.preflight.cluster.check_cluster", of_cluster)
    said = shown("preflight", RL, "--cluster", "--wait-s", "7", code=2).splitlines()
    assert said[0].split() == ["error", "nodes", "cpu,", "7", "s"] and said[1].startswith("1 error, 0 warnings, 0 ")


def test_the_options_of_eval_arrive(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}
    monkeypatch.setattr("retool_mcore.cli.evaluate._show", lambda reports: seen.update(shown=reports))
    monkeypatch.setattr(
        "retool_mcore.evaluate.cases.evaluate_many", lambda run, cases, **more: seen.update(more, run=run) or {"x": {}}
    )
    monkeypatch.setattr("retool_mcore.cli.evaluate.exit_on_sigterm", lambda **_: None)
    files, columns = ("--data", "a.jsonl", "--data", "b.jsonl"), ("--problem", "p", "--problem", "q", "--answer", "t")
    numbers = ("--n", "3", "--concurrency", "7", "--limit", "5", "--protocol", "retool", "rollout.max_turns=2")
    shown("eval", RL, "--model", "m=x", *files, *columns, *numbers, "--url", "http://h:1", "--out", "o")
    arrived = {"data": [Path("a.jsonl"), Path("b.jsonl")], "out": Path("o"), "n": 3, "concurrency": 7, "limit": 5}
    arrived |= {"url": "http://h:1", "endpoint": None, "shown": {"x": {}}}
    assert {name: seen[name] for name in arrived} == arrived
    assert (seen["columns"].problem, seen["columns"].answer) == (("p", "q"), "t")
    assert (seen["run"].rollout.protocol, seen["run"].rollout.max_turns) == ("retool", 2)


@pytest.mark.parametrize("tool", [True, False])
def test_the_options_of_rollout_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_dir: Path, tool: bool):
    seen: dict[str, Any] = {}

    async def sampled(prompts: Any, out: Path, **options: Any) -> int:
        seen.update(options, prompts=prompts, out=out)
        return 2

    monkeypatch.setattr("retool_mcore.rollout.batch.sample_prompts", sampled)
    prompts = [[{"role": "user", "content": text}] for text in ("1 + 1?", "2 + 2?")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in prompts), encoding="utf-8")
    options = "--n 2 --concurrency 5 --temperature 0.4 --top-p 0.9 --max-turns 3 --run-timeout-s 2.5 --calls all "
    options += "--max-response-tokens 70 --max-tool-output-tokens 9 --sandbox http://a --sandbox http://b"
    words = ["--url", "http://h:1", "--model", str(model_dir), "--prompt-file", str(file), "--out", "o.jsonl"]
    shown("rollout", *words, *options.split(), *([] if tool else ["--no-tool"]), code=3)  # two were dropped
    assert (seen["prompts"], seen["out"], seen["url"]) == (prompts, Path("o.jsonl"), "http://h:1")
    loop = ToolLoop(max_turns=3, max_response_tokens=70, max_tool_output_tokens=9).with_tools(tool)
    assert seen["limits"] == Limits.of(loop, SandboxSettings(run_timeout_s=2.5))
    assert seen["sampling"] == Sampling(temperature=0.4, top_p=0.9)
    assert (seen["n"], seen["concurrency"], [*seen["sandbox"]]) == (2, 5, ["http://a", "http://b"] if tool else [])
    assert seen["protocol"].name == ("hermes" if tool else "text")
    assert not tool or seen["protocol"].call_end is None, "all calls of a turn"


def test_the_options_of_view_choose_trajectories(tmp_path: Path):
    steps = [json.loads(line)["step"] for line in (VIEWED / "trajectories/trajectories.jsonl").read_text().splitlines()]
    page, (first, last) = tmp_path / "v.html", (min(steps), max(steps))
    for words, content in (
        ((), f"{len(steps)} trajectories"),
        (("--limit", "7"), f"7 trajectories, a sample of {len(steps)}"),
        (("--step", f"{first}", "--step", f"{last}"), f"{steps.count(first) + steps.count(last)} trajectories"),
    ):
        said = shown("view", str(VIEWED), "--out", str(page), *words)
        assert said == f"wrote {page}: {content}, {page.stat().st_size / 1e6:.1f} MB\n"


@pytest.mark.parametrize(
    ("words", "function", "arguments"),
    [
        ("report a b --out c --eval d --eval e", "report.build.write_report", "[a, b], c, [d, e]"),
        ("export a --to b --checkpoint best --adapter", "run.export.export", "a, b, best, adapter=True"),
        ("quickstart --seed 3 --root a", "quickstart.run", "a, 3"),
        ("data task a --seed 4", "data.tasks.make_task", "a, 4"),
        ("data model a b --dtype float32", "data.gguf_model.write_gguf_model", "a, b, float32"),
        ("data fetch a --local b --only c", "data.fetch.fetch", "a, b, echo, c"),
    ],
)
def test_the_arguments_of_a_command_arrive(words: str, function: str, arguments: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    def called(*given: Any, **named: Any) -> list[str]:
        shown = [str([*map(str, each)]).replace("'", "") if isinstance(each, list) else each for each in given]
        words = [getattr(each, "__name__", str(each)) for each in shown]
        seen.append(", ".join([*words, *(f"{name}={value}" for name, value in named.items())]))
        return []

    monkeypatch.setattr(f"retool_mcore.{function}", called)
    shown(*words.split())
    assert seen == [arguments]


def test_a_limit_reads_the_first_rows(tmp_path: Path):
    sample, out = Path(__file__).parents[1] / "data/samples/gsm8k_60.jsonl", tmp_path / "few.parquet"
    shown("data", "rl", str(sample), "--out", str(out), "--limit", "3")
    truths = [row["reward_model"]["ground_truth"] for _, row in read_rows(out, ("reward_model",))]
    assert truths == [json.loads(line)["answer"].rpartition("#### ")[2] for line in sample.read_text().splitlines()[:3]]


@pytest.mark.parametrize(
    ("problem", "ranks", "code", "said", "waits"),
    [
        (RunError("x"), {}, 3, "error: x", []),
        (ConfigError("x"), {"RANK": "2", "LOCAL_RANK": "0"}, 2, "error: rank 2: x", []),
        (RolloutError("x"), {"RANK": "3", "LOCAL_RANK": "1"}, 3, "error: rank 3: x", [30.0]),
        (PermissionError(errno.EACCES, "", "a"), {}, 2, "error: permission denied (a). Choose another path, or", []),
        (OSError(errno.ENOSPC, "", "a", None, "b"), {}, 2, "error: no space is left (b). Complete files are kept.", []),
    ],
)
def test_an_error_is_one_line_and_a_code_that_says_whether_to_try_again(  # noqa: PLR0917
    problem: Exception, ranks: dict[str, str], code: int, said: str, waits: list[float],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    slept: list[float] = []
    monkeypatch.setattr("retool_mcore.cli.common.time.sleep", slept.append)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)

    @guarded
    def command() -> None:
        raise problem

    with pytest.raises(typer.Exit) as ended:
        command()
    line = capsys.readouterr().err
    assert (ended.value.exit_code, line.count("\n"), slept) == (code, 1, waits)
    assert line.startswith(said), line
