"""Each check of `retool preflight` says ok on a good run, and the value, the rule and what to do on
a bad one.
"""

import importlib.metadata
import resource
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.config.saving import Best
from retool_mcore.errors import ConfigError
from retool_mcore.platforms import get_platform
from retool_mcore.preflight import inputs, machine
from retool_mcore.preflight.check import CheckScope, _findings, require
from retool_mcore.preflight.cluster import NODE_SETTINGS, _node_facts
from retool_mcore.preflight.findings import Finding, note, ok, warning
from retool_mcore.run.environment import differing, fingerprint
from tests.plain_chatml import PLAIN_CHATML

ROOT = Path(__file__).parents[3]
RL = ROOT / "configs" / "rl_tiny_cpu.toml"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from retool_mcore.data.tasks import TaskSpec, make_task

    folder = tmp_path_factory.mktemp("task")
    make_task(folder, 0, TaskSpec(sft_train=32, sft_val=8, rl_train=32, rl_val=8, eval=8))
    return folder


def settings(task: Path, *more: str) -> list[str]:
    files = (f"data.train_file={task}/rl_train.parquet", f'validation.files=["{task}/rl_val.parquet"]')
    return [f"model.path={task}/model", f"run.root={task}/runs", *files, *more]


def good(task: Path, *more: str) -> RlConfig:
    return load_config(RlConfig, RL, settings(task, *more))


HERE = CheckScope(platform=get_platform("cpu"))


def judged(name: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(_findings(name, look, HERE))


def levels(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


def test_versions_are_compared_with_the_extra_of_the_platform(monkeypatch: pytest.MonkeyPatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "verl" else real(name))
    found = list(machine.versions(get_platform("cpu"), extras=True))
    assert levels(found) == ["error"]
    assert "verl 0.1 is installed, but verl==0.9.1 is needed" in found[0].text

    def absent(name: str) -> str:
        if name == "verl":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    (found,) = machine.versions(get_platform("cpu"), extras=True)
    assert (found.severity, found.text) == ("error", "verl==0.9.1 is needed but not installed. Run `make install`.")


def test_versions_are_compared_with_the_base_requirements(monkeypatch: pytest.MonkeyPatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.1.4" if name == "tenacity" else real(name))
    (found,) = machine.versions(get_platform("cpu"), extras=False)
    assert found.severity == "error" and "tenacity 9.1.4 is installed, but tenacity" in found.text
    assert "pip install 'tenacity" in found.text


@pytest.mark.parametrize(
    ("stall_s", "level", "message"),
    [
        (0, "ok", "train.stall_s = 0; the pass"),
        (1000, "warning", "train.stall_s = 1000 would end the run: the pass"),
        (2233, "warning", "train.stall_s = 2233 leaves too little margin: the pass"),
        (2234, "ok", "train.stall_s = 2234; the pass"),
    ],
)
def test_a_limit_of_silence_is_compared_with_the_plan(stall_s: int, level: str, message: str):
    run = load_config(RlConfig, ROOT / "configs" / "rl_qwen2.5_32b_h200x8.toml", [f"train.stall_s={stall_s}"])
    (found,) = inputs.stall(run)
    assert (found.severity, found.text.startswith(message)) == (level, True), found.text
    assert "the pass for old log-probabilities is planned to take 1,117 s" in found.text


def test_too_few_devices(task: Path):
    run = good(task).model_copy(update={"cluster": good(task).cluster.model_copy(update={"gpus_per_node": 4096})})
    found = judged("devices", lambda: machine.devices(run, get_platform("cpu")))
    assert levels(found) == ["error"] and "4096" in found[0].text
    assert set(levels(judged("devices", lambda: machine.devices(good(task), get_platform("cpu"))))) == {"ok"}


@pytest.mark.parametrize(("free_gib", "level"), [(0.0001, "error"), (0.015, "warning"), (500, "ok")])
def test_the_disk_must_hold_the_checkpoints(monkeypatch, task: Path, free_gib: float, level: str):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, int(free_gib * 2**30)))
    found = list(machine.disk(good(task)))
    assert levels(found) == [level] and "a checkpoint takes" in found[0].text


def test_the_disk_must_hold_one_checkpoint_more_than_are_kept_and_the_best(monkeypatch, task: Path):
    monkeypatch.setattr(machine, "_params", lambda _: 10**9)
    best = good(task).model_copy(update={"best": Best(metric="val_loss")})
    texts = [finding.text for config in (good(task), best) for finding in machine.disk(config)]
    assert good(task).checkpoint.keep == 2  # 14 bytes per parameter
    assert "a checkpoint takes 13.0, the run 39.1 GiB" in texts[0] and "the run 52.2 GiB" in texts[1]


def test_a_run_that_saves_nothing_needs_no_room_for_it(monkeypatch: pytest.MonkeyPatch, task: Path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2**20))
    config = good(task)
    nothing = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 0, "export": False})}
    )
    assert [finding.severity for finding in machine.disk(config)] == ["error"]
    assert [finding.severity for finding in machine.disk(nothing)] == ["ok"]
    *_, last = machine.settings(nothing, get_platform("cpu"))
    assert last.severity == "warning" and "will not save the trained weights" in last.text
    assert levels(list(machine.settings(config, get_platform("cpu")))) == ["ok"]
    slow = SimpleNamespace(name="slow", check_settings=lambda _: None, remarks=lambda _: ["it is slow"])
    assert [*machine.settings(config, slow)][1:] == [warning("settings", "it is slow")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings_", "needed"),
    [
        (("memory.offload_idle=true", "parallel.tp=2"), 26.1),  # 2 bytes * 4 copies + 12 / 2 nodes
        (("memory.offload_idle=false", "memory.optimizer_on_cpu=0.5", "memory.adam_states=compact"), 4.7),
    ],
)
def test_a_host_must_hold_what_moves_there(monkeypatch, tmp_path: Path, settings_: tuple[str, ...], needed: float):
    """Two billion parameters on two nodes of 8 GPUs; compact states have 10 bytes."""
    run = load_config(RlConfig, ROOT / "configs" / "rl_qwen2.5_7b_h200x8.toml", ["cluster.nodes=2", *settings_])
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(machine, "_params", lambda _: 2 * 10**9)
    monkeypatch.setattr(machine, "Path", lambda _: meminfo)
    for available_gib, level in ((2, "error"), (50, "ok")):
        meminfo.write_text(f"MemTotal: 9999999999 kB\nMemAvailable:  {available_gib * 2**20} kB\n", encoding="utf-8")
        (found,) = machine.host_memory(run)
        assert found.severity == level
        assert found.text.startswith(f"{available_gib} GiB available, {needed} GiB needed for weights and optimizer st")


def test_little_shared_memory_is_a_warning_and_few_files_are_an_error(monkeypatch: pytest.MonkeyPatch):
    cpu = get_platform("cpu")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2**26))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert levels(list(machine.shared_memory(cpu))) == ["warning"]
    found = list(machine.open_files(cpu))
    assert levels(found) == ["error", "error", "warning"]  # files, the address space, processes
    assert "ulimit -n" in found[0].text and "ulimit -v" in found[1].text
    for files, processes, wanted in ((4095, 4095, ["warning", "warning"]), (4096, 4096, ["ok"])):
        both = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes}
        monkeypatch.setattr(resource, "getrlimit", lambda which, both=both: (both.get(which, -1), -1))
        assert levels(list(machine.open_files(cpu))) == wanted


def test_a_model_is_looked_up_where_its_name_says(task: Path, monkeypatch: pytest.MonkeyPatch):
    (found,) = judged("model", lambda: inputs.model(good(task), fetch=False))
    assert (found.severity, found.text.startswith(f"{task}/model: qwen2, ")) == ("ok", True), found
    (found,) = judged("model", lambda: inputs.model(good(task, "model.path=/absent/model"), fetch=True))
    assert (found.severity, found.text.partition(",")[0]) == ("error", "model.path = /absent/model does not exist")
    monkeypatch.setattr(inputs, "check_model", lambda config: None)
    for cached, fetch, level in (({}, False, "error"), ({}, True, "warning"), ({"a": 1}, False, "warning")):
        monkeypatch.setattr(inputs, "read_config", lambda path, cached=cached: cached)
        (found,) = judged("model", lambda fetch=fetch: inputs.model(good(task, "model.path=my/model"), fetch=fetch))
        assert found.severity == level and "my/model" in found.text


def test_a_template_without_tool_turns(task: Path, tmp_path: Path):
    (tmp_path / "plain.jinja").write_text(PLAIN_CHATML, encoding="utf-8")
    run = good(task, f"model.chat_template={tmp_path / 'plain.jinja'}")
    found = judged("tokenizer", lambda: inputs.tokenizer(run))
    assert levels(found) == ["error"] and "tool" in found[0].text, found


def test_validation_on_the_training_file(task: Path):
    both = f'validation.files=["{task}/rl_val.parquet", "{task}/rl_train.parquet"]'
    run = good(task, both)
    found = judged("data", lambda: inputs.data(run, all_rows=True, render=True))
    assert "error" in levels(found)
    run = good(task, both, "data.allow_overlap=true")
    assert set(levels(judged("data", lambda: inputs.data(run, all_rows=True, render=True)))) == {"ok", "note"}
    run = good(task, "data.train_file=a", 'validation.files=["b"]')
    (found,) = judged("data", lambda: inputs.data(run, all_rows=True, render=True))
    assert found.severity == "error" and found.text.startswith("data.train_file = a and validation.files = b not ")


def test_checks_go_on_after_an_error():
    def wrong():
        yield ok("first", "fine")
        raise ConfigError("a value, a rule")

    message = [str(finding) for finding in judged("first", wrong)]
    assert message == ["ok      first           fine", "error   first           a value, a rule"]
    with pytest.raises(ConfigError, match=r"^a value, a rule\nerror: a value, a rule$"):
        require([*judged("first", wrong), *judged("second", wrong)])
    assert require([ok("a", "fine"), note("b", "one"), warning("c", "two")]) == ["one", "two"]


def test_one_of_a_folders_files_that_differs_on_a_node_is_named(task: Path, tmp_path: Path):
    """One byte of it, at the same size; both nodes see it under one path."""
    for name in ("a", "b"):
        shutil.copy(task / "rl_train.parquet", tmp_path / f"{name}.parquet")
    run = good(task, f"data.train_file={tmp_path}")
    first = fingerprint(run)
    bytes_ = bytearray((tmp_path / "b.parquet").read_bytes())
    bytes_[100] ^= 1
    (tmp_path / "b.parquet").write_bytes(bytes_)
    (sentence,) = differing([first, {**fingerprint(run), "host": "other"}])
    assert sentence.startswith(f"data.train_file = {tmp_path}/b.parquet is ") and sentence.endswith(" on other")


def test_a_node_with_other_settings_is_named_by_the_key(task: Path):
    here, there = fingerprint(good(task)), fingerprint(good(task, "optim.lr=3e-6", "run.seed=9"))
    assert sorted(differing([here, {**there, "host": "b"}])) == [
        f"optim.lr is 0.0002 on {here['host']} and 3e-06 on b",
        f"run.seed is 0 on {here['host']} and 9 on b",
    ]
    more = fingerprint(good(task, "verl_overrides.trainer.balance_batch=false"))
    assert differing([here, {**more, "host": "b"}]) == [
        f"verl_overrides.trainer.balance_batch is not set on {here['host']} and False on b"
    ]


def test_a_ray_node_is_asked_for_the_settings_of_its_own_script(task: Path, monkeypatch: pytest.MonkeyPatch):
    run = good(task)
    assert _node_facts(run)[0] == fingerprint(run)
    monkeypatch.setenv(NODE_SETTINGS, "\n".join([str(RL), *settings(task, "optim.lr=3e-6")]))
    assert any("optim.lr" in sentence for sentence in differing([fingerprint(run), _node_facts(run)[0]]))


def test_each_sandbox_is_called(task: Path, monkeypatch):
    called: list[str] = []

    async def execute(config: RlConfig, where: str) -> tuple[str, str]:
        called.append(where)
        return "namespaces", "42\n" if where.endswith("a") else "7\n"

    monkeypatch.setattr(inputs, "probe_sandbox", execute)
    found = list(inputs.sandbox(good(task, 'sandbox.where=["http://a","http://b"]')))
    assert called == ["http://a", "http://b"]
    assert found[0] == ok("sandbox", "http://a ran print(6 * 7) at level namespaces, rlimits or better required")
    assert found[1].severity == "error" and "http://b printed '7\\n'" in found[1].text
