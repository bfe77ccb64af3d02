"""An evaluation's servers: devices and arguments, which trajectories they get, which weights.

Also the settings of `retool eval` without a configuration, and the model of a server's URL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import pytest
import torch
from safetensors.torch import save_file

from retool_mcore.config import EvaluationConfig, load_evaluation
from retool_mcore.data.task_model import write_model
from retool_mcore.errors import CheckpointError, ConfigError, RolloutError
from retool_mcore.evaluate import cases, servers
from retool_mcore.evaluate.cases import default_config, model_of_server
from retool_mcore.evaluate.servers import Servers, SpreadEngine
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.base import PREFILLS_ENV
from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.rollout.engine import Sampling, TurnRequest
from retool_mcore.rollout.sglang_http import SglangEngine

CONFIGS = Path(__file__).parents[3] / "configs"


class Node(Cuda):
    """A CUDA machine of so many devices."""

    def __init__(self, devices: int) -> None:
        self.devices = devices

    def device_count(self) -> int:
        return self.devices


def model_of(folder: Path, config: dict[str, Any]) -> str:
    """A folder with this config.json, and weights that nobody reads."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return str(folder)


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


def test_each_server_has_its_own_arguments(fake: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(servers, "get_platform", lambda name: Node(4))
    model = model_of(tmp_path, {})
    args = 'rollout.engine_args={attention_backend="triton",enable_metrics=true}'
    settings = ("rollout.engine_tp=2", "run.seed=7", "rollout.batch_prefills=false", args)
    with Servers(h200x8(*settings), tmp_path, None) as running:
        assert len(running) == 2
        assert running.urls_of(model) == ["http://0", "http://1"]
    assert fake.calls == ["start", "start", "wait", "wait", "stop", "stop"]
    shared = {"attention_backend": "triton", "enable_metrics": True, "cuda_graph_backend_prefill": "disabled"}
    same = {"model": model, "dtype": "bfloat16", "tp": 2, "max_running_requests": 256, "env": {PREFILLS_ENV: "0"}}
    assert fake.made == [
        same | {"engine_args": shared | {"random_seed": seed}, "devices": devices, "log_path": tmp_path / log}
        for seed, devices, log in ((7, [0, 1], "server_0.log"), (8, [2, 3], "server_1.log"))
    ]
    options = {"dtype": "float32", "max_running_requests": 1, "engine_args": {"sampling_backend": "own"}}
    command = get_platform("cpu").sglang_command("model", 1, **options)
    assert command[command.index("--sampling-backend") + 1] == "own", "and not the platform's"


async def test_a_trajectory_stays_with_its_engine_and_all_engines_are_used():
    engines = [AsyncMock() for _ in range(4)]
    for trajectory in range(200):
        ids: Any = {"token_ids": [1], "stop_token_ids": (), "trajectory_id": f"{trajectory}-0"}
        request = TurnRequest(**ids, max_new_tokens=1, sampling=Sampling())
        for _ in range(2):
            await SpreadEngine(engines).generate(request)
    seen = [[call.args[0].trajectory_id for call in engine.generate.call_args_list] for engine in engines]
    assert min(map(len, seen)) >= 60, "of 400 turns, 100 each on average"
    assert len(set().union(*seen)) == sum(len(set(each)) for each in seen) == 200


def test_the_next_models_weights_go_to_the_running_server(fake: type[FakeServer], tmp_path: Path, tokenizer: Any):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    for seed, model in enumerate((first, second)):
        write_model(Path(model), tokenizer, seed=seed)
    config = load_evaluation(CONFIGS / "rl_tiny_cpu.toml", [])
    running = Servers(config, tmp_path, None)
    urls = running.urls_of(first)
    assert running.urls_of(first) == urls  # the same model without its tool
    assert running.urls_of(second) == urls
    assert (len(fake.made), fake.loaded) == (1, {urls[0]: second})
    fake.keeps_weights = True
    with pytest.raises(RolloutError, match=r"should have loaded .*first, but reports .*second"):
        running.urls_of(first)
    path = Path(first) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 7}))
    assert running.urls_of(first) != urls, "another architecture needs another server"
    assert [each["model"] for each in fake.made] == [first, first]
    assert fake.calls == ["start", "wait", "stop", "start", "wait"], "a device has room for one model"
    with pytest.raises(ConfigError, match="serves one model, but there are 2 models"):
        Servers(config, tmp_path, "http://x", ["a", "b"])
    path.rename(path.with_name("config.toml"))
    with pytest.raises(CheckpointError, match=r"first is a run, not a model. Evaluate .*first/export"):
        servers.config_of(first)


PUBLISHED = json.loads(Path(__file__).with_name("published_config.json").read_text(encoding="utf-8"))


def test_a_published_model_and_its_export_share_a_server(tmp_path: Path):
    from transformers import AutoConfig

    def architecture(**config: Any) -> dict[str, Any]:
        return servers.architecture_of(model_of(tmp_path, config))

    published = architecture(**PUBLISHED)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "export")  # as the bridge writes it
    exported = json.loads((tmp_path / "export" / "config.json").read_text(encoding="utf-8"))
    assert "rope_parameters" in exported, "else the two files spell it alike, and this test shows nothing"
    assert architecture(**exported) == published
    for key, value in (("rope_theta", 10000.0), ("eos_token_id", 151643)):
        assert architecture(**PUBLISHED | {key: value}) != published
    known = architecture(model_type="unknown", width=8, dtype="float32")  # transformers does not know this type
    assert known == architecture(model_type="unknown", width=8, dtype="bfloat16")
    assert known != architecture(model_type="unknown", width=9, dtype="float32")


@pytest.mark.parametrize(("tokens", "prompt", "response"), [(1024, 512, 512), (32768, 2048, 16384)])
def test_the_papers_rollout_is_as_long_as_the_model_allows(tmp_path: Path, tokens: int, prompt: int, response: int):
    run = default_config(model_of(tmp_path, {"max_position_embeddings": tokens}), [])
    assert (run.data.max_prompt_tokens, run.rollout.max_response_tokens) == (prompt, response)
    assert (run.rollout.max_turns, run.validation.temperature, run.validation.top_p) == (8, 1.0, 0.6)
    assert (run.validation.n, run.run.trackers, run.cluster.gpus_per_node, run.model.dtype) == (8, [], 1, "float32")
    changed = default_config(str(tmp_path), ["rollout.protocol=retool", "validation.top_p=0.9"])
    assert (changed.rollout.protocol, changed.validation.top_p) == ("retool", 0.9)


def test_a_machine_of_several_gpus_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cases, "detect_platform", lambda: Node(8))
    run = default_config(model_of(tmp_path, {}), ["rollout.engine_tp=2"])
    assert len(Node(8).server_devices(run)) == 4


def test_a_server_reports_its_model(monkeypatch: pytest.MonkeyPatch):
    answer: dict[str, object] = {"model_path": "a", "tokenizer_path": "b"}

    async def model_info(self: SglangEngine) -> dict[str, object]:
        return answer if self.url == "http://here" else {}

    monkeypatch.setattr(SglangEngine, "model_info", model_info)
    assert model_of_server("http://here") == "b"
    del answer["tokenizer_path"]
    assert model_of_server("http://here") == "a"
    with pytest.raises(ConfigError, match="Use --model DIRECTORY --url http://there"):
        model_of_server("http://there")
