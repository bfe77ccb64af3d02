"""`retool eval` without a configuration, and of a server's URL."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate import cases
from retool_mcore.evaluate.cases import default_config, model_of_server
from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.rollout.sglang_http import SglangEngine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", build_tokenizer(tokenizer_rows()), seed=0)
    return tmp_path / "model"


def longest(model: Path, tokens: int) -> str:
    """The model with another context length."""
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": tokens}))
    return str(model)


@pytest.mark.parametrize(("tokens", "prompt", "response"), [(1024, 512, 512), (32768, 2048, 16384)])
def test_the_papers_rollout_is_as_long_as_the_model_allows(model: Path, tokens: int, prompt: int, response: int):
    run = default_config(longest(model, tokens), [])
    assert (run.data.max_prompt_tokens, run.rollout.max_response_tokens) == (prompt, response)
    assert (run.rollout.max_turns, run.validation.temperature, run.validation.top_p) == (8, 1.0, 0.6)
    assert (run.validation.n, run.run.trackers, run.cluster.gpus_per_node, run.model.dtype) == (8, [], 1, "float32")
    changed = default_config(str(model), ["rollout.protocol=retool", "validation.top_p=0.9"])
    assert (changed.rollout.protocol, changed.validation.top_p) == ("retool", 0.9)
    with pytest.raises(ConfigError, match=r"rollout\.topp is not a setting.*\(command line\)"):
        default_config(str(model), ["rollout.topp=1"])


def test_a_machine_of_several_gpus_is_filled(model: Path, monkeypatch: pytest.MonkeyPatch):
    class EightGpus(Cuda):
        def check_machine(self) -> None:
            pass

        def device_count(self) -> int:
            return 8

    monkeypatch.setattr(cases, "detect_platform", EightGpus)
    assert len(EightGpus().server_devices(default_config(str(model), ["rollout.engine_tp=2"]))) == 4


@pytest.mark.parametrize(
    ("answer", "model"),
    [({"model_path": "a", "tokenizer_path": "b"}, "b"), ({"model_path": "a"}, "a"), ({}, None)],
)
def test_a_server_reports_its_model(monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], model: str | None):
    async def model_info(self: SglangEngine) -> dict[str, object]:
        return answer if self.url == "http://here" else {}

    monkeypatch.setattr(SglangEngine, "model_info", model_info)
    with nullcontext() if model else pytest.raises(ConfigError, match="Use --model DIRECTORY --url http://here"):
        assert model_of_server("http://here") == model
