"""An evaluation's servers: devices and arguments, which trajectories they get, which weights."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from retool_mcore.config import EvaluationConfig, load_evaluation
from retool_mcore.data.task_model import write_model
from retool_mcore.errors import CheckpointError, ConfigError, RolloutError
from retool_mcore.evaluate import servers
from retool_mcore.evaluate.servers import CONNECTING, Servers, SpreadEngine
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.base import PREFILLS_ENV
from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.rollout.engine import EngineTurn, Sampling, TurnRequest
from retool_mcore.run.start import STAGES

CONFIGS = Path(__file__).parents[3] / "configs"


class Node(Cuda):
    """A CUDA machine of so many devices."""

    def __init__(self, devices: int) -> None:
        self.devices = devices

    def device_count(self) -> int:
        return self.devices


def h200x8(*settings: str) -> EvaluationConfig:
    return load_evaluation(CONFIGS / "rl_qwen2.5_7b_h200x8.toml", settings)


@pytest.mark.parametrize(
    ("present", "settings", "groups"),
    [
        (8, ("cluster.gpus_per_node=4",), [[0], [1], [2], [3]]),
        (2, (), [[0], [1]]),
        (7, ("rollout.engine_tp=2",), [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_servers_fill_the_devices_of_the_node(present: int, settings: tuple[str, ...], groups: list[list[int]]):
    assert Node(present).server_devices(h200x8(*settings)) == groups
    with pytest.raises(ConfigError, match=r"rollout.engine_tp = 4 is more than the 2 devices"):
        Node(2).server_devices(h200x8("rollout.engine_tp=4"))


class FakeServer:
    """A server without a process. It reports the model whose weights it has."""

    made: ClassVar[list[dict[str, Any]]] = []  # the arguments of each
    calls: ClassVar[list[str]] = []
    loaded: ClassVar[dict[str, str]] = {}  # by URL
    keeps_weights = False  # ignores new weights

    def __init__(self, model: str, platform: Any, **options: Any) -> None:
        self.url, self.model = f"http://{len(FakeServer.made)}", model
        FakeServer.made.append({"model": model, **options})

    def start(self) -> None:
        FakeServer.calls.append("start")
        FakeServer.loaded[self.url] = self.model

    def wait_until_healthy(self) -> None:
        FakeServer.calls.append("wait")

    def stop(self) -> None:
        FakeServer.calls.append("stop")


class Client:
    """The client of a ``FakeServer`` server."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def load(self, model: str) -> None:
        if not FakeServer.keeps_weights:
            FakeServer.loaded[self.url] = model

    async def model_info(self) -> dict[str, Any]:
        return {"model_path": FakeServer.loaded[self.url]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    FakeServer.made, FakeServer.calls, FakeServer.loaded, FakeServer.keeps_weights = [], [], {}, False
    monkeypatch.setattr(servers, "SglangServer", FakeServer)
    monkeypatch.setattr(servers, "SglangEngine", Client)
    return FakeServer


def test_each_server_has_its_devices_its_seed_its_log_and_the_runs_engine_args(
    fake: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers, "get_platform", lambda name: Node(4))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    args = 'rollout.engine_args={attention_backend="triton",enable_metrics=true}'
    settings = ("rollout.engine_tp=2", "run.seed=7", "rollout.batch_prefills=false", args)
    with Servers(h200x8(*settings), tmp_path, None) as running:
        assert len(running) == 2
        assert running.urls_of(str(model)) == ["http://0", "http://1"]
    assert fake.calls == ["start", "start", "wait", "wait", "stop", "stop"]
    options = {"dtype": "float32", "max_running_requests": 1, "engine_args": {"sampling_backend": "own"}}
    command = get_platform("cpu").sglang_command("model", 1, **options)
    assert command[command.index("--sampling-backend") + 1] == "own", "and not the platform's"
    shared = {"attention_backend": "triton", "enable_metrics": True, "cuda_graph_backend_prefill": "disabled"}
    same = {"model": str(model), "dtype": "bfloat16", "tp": 2, "max_running_requests": 256, "env": {PREFILLS_ENV: "0"}}
    assert fake.made == [
        same | {"engine_args": shared | {"random_seed": seed}, "devices": devices, "log_path": tmp_path / log}
        for seed, devices, log in ((7, [0, 1], "server_0.log"), (8, [2, 3], "server_1.log"))
    ]


async def test_a_trajectory_stays_with_its_engine_and_all_engines_are_used():
    seen: Counter[int] = Counter()

    class Numbered:
        def __init__(self, number: int) -> None:
            self.number = number

        async def generate(self, request: TurnRequest) -> EngineTurn:
            seen[self.number] += 1
            return EngineTurn(token_ids=[self.number], logprobs=[0.0], stop="stop")

    engine = SpreadEngine([Numbered(number) for number in range(4)])
    for trajectory in range(400):
        request = TurnRequest(
            token_ids=[1], max_new_tokens=1, stop_token_ids=(), sampling=Sampling(), trajectory_id=f"{trajectory}-0"
        )
        first, again = await engine.generate(request), await engine.generate(request)
        assert first.token_ids == again.token_ids
    assert min(seen.values()) >= 120, "of 800 turns, 200 each on average"


@pytest.fixture
def tiny(tokenizer: Any, tmp_path: Path) -> tuple[Servers, Path, Path]:
    """Servers of one device, and two folders of one shape with other weights."""
    for seed, name in enumerate(("first", "second")):
        write_model(tmp_path / name, tokenizer, seed=seed)
    config = load_evaluation(CONFIGS / "rl_tiny_cpu.toml", [])
    return Servers(config, tmp_path, None), tmp_path / "first", tmp_path / "second"


def test_the_next_models_weights_go_to_the_running_server(fake: type[FakeServer], tiny: tuple[Servers, Path, Path]):
    running, first, second = tiny
    assert running.stage(str(first)) == STAGES["engines"]
    urls = running.urls_of(str(first))
    stages = [running.stage(str(model)) for model in (first, second)]
    assert stages == [CONNECTING, "loading the model's weights into the engines"]
    assert running.urls_of(str(first)) == urls  # the same model without its tool
    assert running.urls_of(str(second)) == urls
    assert (len(fake.made), fake.loaded) == (1, {urls[0]: str(second)})
    fake.keeps_weights = True
    with pytest.raises(RolloutError, match=r"should have loaded .*first, but reports .*second"):
        running.urls_of(str(first))
    path = first / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 7}))
    assert running.urls_of(str(first)) != urls, "another architecture needs another server"
    assert [each["model"] for each in fake.made] == [str(first), str(first)]
    assert fake.calls == ["start", "wait", "stop", "start", "wait"], "a device has room for one model"
    with pytest.raises(ConfigError, match="serves one model, but there are 2 models"):
        Servers(load_evaluation(CONFIGS / "rl_tiny_cpu.toml", []), first, "http://x", ["a", "b"])
    (first / "config.json").rename(first / "config.toml")
    with pytest.raises(CheckpointError, match=r"first is a run, not a model. Evaluate .*first/export"):
        servers.config_of(str(first))


PUBLISHED = json.loads(Path(__file__).with_name("published_config.json").read_text(encoding="utf-8"))


def folder_of(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"weight": torch.zeros(1)}, path / "model.safetensors")
    return str(path)


def test_a_published_model_and_its_export_share_a_server(tmp_path: Path):
    from transformers import AutoConfig

    published = folder_of(tmp_path / "published", PUBLISHED)
    AutoConfig.from_pretrained(published).save_pretrained(tmp_path / "export")  # as the bridge writes it
    shutil.copy(Path(published) / "model.safetensors", tmp_path / "export")
    exported = json.loads((tmp_path / "export" / "config.json").read_text(encoding="utf-8"))
    assert "rope_parameters" in exported, "else the two files spell it alike, and this test shows nothing"
    architecture = servers.architecture_of(published)
    assert architecture == servers.architecture_of(str(tmp_path / "export"))
    for key, value in (("rope_theta", 10000.0), ("eos_token_id", 151643)):
        assert servers.architecture_of(folder_of(tmp_path / key, PUBLISHED | {key: value})) != architecture
    config = {"model_type": "unknown", "width": 8, "dtype": "float32"}  # transformers does not know this type
    known = servers.architecture_of(folder_of(tmp_path / "first", config))
    assert known == servers.architecture_of(folder_of(tmp_path / "second", config | {"dtype": "bfloat16"}))
    assert known != servers.architecture_of(folder_of(tmp_path / "third", config | {"width": 9}))
