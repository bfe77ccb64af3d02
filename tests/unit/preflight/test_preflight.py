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

from retool_mcore.config import RlConfig, load_config, load_run
from retool_mcore.errors import ConfigError
from retool_mcore.platforms import get_platform
from retool_mcore.preflight import inputs, machine
from retool_mcore.preflight.check import CheckScope, _findings, require
from retool_mcore.preflight.cluster import NODE_SETTINGS, _node_facts
from retool_mcore.preflight.findings import Finding, note, ok, warning
from retool_mcore.run.environment import differing, fingerprint

ROOT = Path(__file__).parents[3]
RL, SFT = ROOT / "configs" / "rl_tiny_cpu.toml", ROOT / "configs" / "sft_tiny_cpu.toml"
CPU = get_platform("cpu")
Usage = namedtuple("Usage", "total used free")


def settings(task: Path, *more: str) -> list[str]:
    files = (f"data.train_file={task}/rl_train.parquet", f'validation.files=["{task}/rl_val.parquet"]')
    return [f"model.path={task}/model", f"run.root={task}/runs", *files, *more]


def good(task: Path, *more: str) -> RlConfig:
    return load_config(RlConfig, RL, settings(task, *more))


def judged(name: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(_findings(name, look, CheckScope(platform=CPU)))


def levels(findings: Iterable[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


@pytest.mark.parametrize(
    ("name", "installed", "extras", "message"),
    [
        ("verl", "0.1", True, "verl 0.1 is installed, but verl==0.9.1 is needed. Run: pip install 'verl==0.9.1'"),
        ("verl", "", True, "verl==0.9.1 is needed but not installed. Run `make install`."),
        ("verl", "0.1", False, ""),
        ("tenacity", "9.1.4", False, "tenacity 9.1.4 is installed, but tenacity"),
    ],
)
def test_versions_are_compared_with_the_requirements_and_the_platforms_extra(
    name: str, installed: str, extras: bool, message: str, monkeypatch: pytest.MonkeyPatch
):
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == name and not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed if package == name else real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (found,) = machine.versions(CPU, extras=extras)
    assert found.severity == ("error" if message else "ok") and found.text.startswith(message)


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
    found = judged("devices", lambda: machine.devices(run, CPU))
    assert levels(found) == ["error"] and "4096" in found[0].text
    assert set(levels(machine.devices(good(task), CPU))) == {"ok"}


@pytest.mark.parametrize(("free_gib", "level"), [(13, "error"), (14, "warning"), (39, "warning"), (40, "ok")])
def test_the_disk_must_hold_one_checkpoint_more_than_are_kept_and_the_best(
    task: Path, free_gib: int, level: str, monkeypatch: pytest.MonkeyPatch
):
    """A checkpoint has 14 bytes per parameter."""
    monkeypatch.setattr(machine, "_params", lambda _: 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free_gib * 2**30))
    (found,) = machine.disk(good(task, "checkpoint.keep=2"))
    assert found.severity == level and "a checkpoint takes 13.0, the run 39.1 GiB" in found.text
    (found,) = machine.disk(good(task, "checkpoint.keep=2", "best.metric=val/accuracy"))
    assert "the run 52.2 GiB" in found.text


def test_a_run_that_saves_nothing_needs_no_room_and_is_told_so(monkeypatch: pytest.MonkeyPatch, task: Path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2**20))
    config, nothing = good(task), good(task, "checkpoint.every_steps=0", "checkpoint.export=false")
    assert levels(machine.disk(config)) == ["error"]
    assert levels(machine.disk(nothing)) == ["ok"]
    *_, last = machine.settings(nothing, CPU)
    assert last.severity == "warning" and "will not save the trained weights" in last.text
    assert levels(machine.settings(config, CPU)) == ["ok"]
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


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2**26))
    assert levels(machine.shared_memory(CPU)) == ["warning"]


@pytest.mark.parametrize(
    ("files", "processes", "addresses", "wanted"),
    [
        (256, 256, 256, ["error", "error", "warning"]),  # files, the address space, processes
        (4095, 4095, -1, ["warning", "warning"]),
        (4096, 4096, -1, ["ok"]),
    ],
)
def test_limits_below_what_is_needed_are_errors_and_below_what_is_recommended_warnings(
    files: int, processes: int, addresses: int, wanted: list[str], monkeypatch: pytest.MonkeyPatch
):
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes, resource.RLIMIT_AS: addresses}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))
    assert levels(machine.open_files(CPU)) == wanted


@pytest.mark.parametrize(
    ("config", "interface", "mode", "message"),
    [
        (SFT, "ib0", "", []),
        (SFT, "", "disabled", ["SOCKET_IFNAME is not set"]),
        (RL, "ib0", "token", []),
        (RL, "ib0", "disabled", ["can run code as you"]),
    ],
)
def test_ports_of_several_nodes_that_can_be_closed_are_warnings(
    config: Path, interface: str, mode: str, message: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(machine.INTERFACE, interface)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    found = list(machine.network(load_run(config, ["cluster.nodes=2"])))
    assert levels(found) == ["warning"] * len(message)
    assert all(text in each.text for text, each in zip(message, found, strict=True))


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


def test_validation_on_the_training_file(task: Path):
    def found(*settings_: str) -> list[Finding]:
        return judged("data", lambda: inputs.data(good(task, *settings_), all_rows=True, render=True))

    both = f'validation.files=["{task}/rl_val.parquet", "{task}/rl_train.parquet"]'
    assert "error" in levels(found(both))
    assert set(levels(found(both, "data.allow_overlap=true"))) == {"ok", "note"}
    (absent,) = found("data.train_file=a", 'validation.files=["b"]')
    assert absent.severity == "error" and absent.text.startswith("data.train_file = a and validation.files = b not ")


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


def test_a_node_with_other_settings_is_asked_for_those_of_its_own_script(task: Path, monkeypatch: pytest.MonkeyPatch):
    run = good(task)
    here, _ = _node_facts(run)
    assert here == fingerprint(run)
    other = settings(task, "optim.lr=3e-6", "verl_overrides.trainer.balance_batch=false")
    monkeypatch.setenv(NODE_SETTINGS, "\n".join([str(RL), *other]))
    there, _ = _node_facts(run)
    assert sorted(differing([here, {**there, "host": "b"}])) == [
        f"optim.lr is 0.0002 on {here['host']} and 3e-06 on b",
        f"verl_overrides.trainer.balance_batch is not set on {here['host']} and False on b",
    ]


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
