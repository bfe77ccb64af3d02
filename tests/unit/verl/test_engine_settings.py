"""rollout.precision and rollout.engine_args: what an engine gets, and what is refused."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import EvaluationConfig, RlConfig, load_config, load_evaluation
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.errors import ConfigError
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.base import sglang_options
from retool_mcore.verl.keys.rollout import check_engine_args, engine_args
from retool_mcore.verl.keys.tree import ppo_tree

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

CONFIGS = Path(__file__).parents[3] / "configs"
H200 = CONFIGS / "rl_qwen2.5_7b_h200x8.toml"
FP8 = ("rollout.precision=fp8", "algorithm.importance_sampling=token")
CACHE = ("rollout.kv_cache=fp8", "algorithm.importance_sampling=token")


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """verl's adapter of an engine in FP8, as a worker with an actor makes it."""
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import get_rollout_class

    write_model(tmp_path / "model", build_tokenizer(tokenizer_rows()), seed=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    shared = HFModelConfig(path=str(tmp_path / "model"))
    return get_rollout_class("sglang")(RolloutConfig(name="sglang", quantization="fp8"), shared, None)


def test_an_export_of_the_actor_claims_no_fp8(adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from retool_mcore.verl.workers import SavingActorWorker

    worker: Any = object.__new__(SavingActorWorker)
    worker.actor = None
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: setattr(self, "rollout", adapter))
    actors = adapter.model_config
    actors.hf_config.save_pretrained(tmp_path / "before")
    assert "quantization_config" in json.loads((tmp_path / "before" / "config.json").read_text()), "verl shares it"
    worker.init_model()
    actors.hf_config.save_pretrained(tmp_path / "export")
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    assert adapter.model_config.hf_config.quantization_config["weight_block_size"] == [128, 128]
    adapter._engine = "the address of a server that died"
    worker.forget_engines()
    assert adapter._engine is None


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (H200, FP8[:1], 'algorithm.importance_sampling = "off" does not correct'),
        (H200, CACHE[:1], 'rollout.kv_cache = "fp8" changes the engine\'s probabilities'),
        (H200, (*CACHE, "rollout.engine_args={quantization_param_path='s.json'}"), "path: rollout.kv_cache"),
    ],
)
def test_what_cannot_work_is_refused(config: Path, settings: tuple[str, ...], message: str):
    with pytest.raises(ConfigError) as caught:
        check_engine_args(load_config(RlConfig, config, settings), get_platform("cuda"))
    assert message in str(caught.value)


def test_a_draft_model_is_refused_in_training_alone():
    """Nothing would ever give it weights there; `retool eval` reads them from disk."""
    run = load_config(RlConfig, H200)
    run.rollout.engine_args["speculative_algorithm"] = "EAGLE3"
    with pytest.raises(ConfigError, match=r'speculative_algorithm = "EAGLE3".*Use "NGRAM"'):
        check_engine_args(run, get_platform("cuda"))
    check_engine_args(EvaluationConfig.of(run), get_platform("cuda"))
    run.rollout.engine_args.update(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)
    check_engine_args(run, get_platform("cuda"))  # drafts of earlier text are allowed


def test_an_unknown_argument_is_refused_with_the_nearest_name():
    config = load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", ['rollout.engine_args={attention_backnd="triton"}'])
    with pytest.raises(ConfigError, match=r"has attention_backnd, which SGLang .* mean attention_backend"):
        check_engine_args(config, get_platform("cpu"))


def test_a_cpu_has_no_fp8():
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache = 'fp8' needs GPU kernels"):
        get_platform("cpu").check_settings(load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", CACHE))


def test_a_cache_in_fp8_is_an_argument_of_a_training_runs_server():
    """SGLang parses it, together with FP8 weights. An evaluation keeps its own argument."""
    from sglang.srt.server_args import ServerArgs

    cuda, parser = get_platform("cuda"), ArgumentParser()
    ServerArgs.add_cli_args(parser)

    def cache_of(run: RlConfig | EvaluationConfig) -> str:
        options = sglang_options(engine_args(run, cuda))
        return parser.parse_known_args(["--model-path", "m", *options])[0].kv_cache_dtype

    run = load_config(RlConfig, H200, (*CACHE, "rollout.precision=fp8"))
    assert cache_of(run) == "fp8_e4m3"
    assert cache_of(load_config(RlConfig, H200)) == "auto"
    assert cache_of(EvaluationConfig.of(run)) == "auto"
    rollout = ppo_tree(run, cuda).actor_rollout_ref.rollout
    assert rollout.engine_kwargs.sglang.kv_cache_dtype == "fp8_e4m3" and rollout.quantization == "fp8"
    evaluation = EvaluationConfig.of(run)
    evaluation.rollout.engine_args["kv_cache_dtype"] = "fp8_e5m2"
    assert cache_of(evaluation) == "fp8_e5m2"


@pytest.mark.parametrize(
    ("words", "largest"),
    [
        ((), 512),
        (("rollout.max_running_requests=300",), 300),
        (("rollout.engine_args={cuda_graph_max_bs_decode=64}",), 64),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_decoding_of_all_requests_that_run_at_once_is_captured(words: tuple[str, ...], largest: int | None):
    """SGLang by itself captures 256. An evaluation gets the same, the CPU's engine nothing."""
    name = "cuda_graph_max_bs_decode"
    config = load_config(RlConfig, CONFIGS / "rl_gsm8k_gpu1.toml", list(words))
    evaluation = load_evaluation(CONFIGS / "rl_gsm8k_gpu1.toml", list(words))
    assert engine_args(config, get_platform("cuda")).get(name) == largest
    assert engine_args(evaluation, get_platform("cuda")).get(name) == largest
    assert ("engine_args" in " ".join(words)) == (name in engine_args(config, get_platform("cpu")))
    assert get_platform("cuda").rollout.engine.graphs(300, 4) == {}, "from TP 4 on SGLang captures 512 by itself"
