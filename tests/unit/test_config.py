"""A configuration is strict, complete and says what is wrong with it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import Parallel, RlConfig, SftConfig, load_config, load_run
from retool_mcore.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
SFT, RL = CONFIGS / "sft_tiny_cpu.toml", CONFIGS / "rl_tiny_cpu.toml"
WRONG = tomllib.loads(Path(__file__).with_name("wrong_settings.toml").read_text(encoding="utf-8"))["case"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_config_loads(path: Path):
    kind = SftConfig if path.name.startswith("sft_") else RlConfig
    assert load_config(kind, path).run.name == path.stem


def test_context_parallel_ranks_share_the_tokens_of_a_sequence():
    tokens = ("train.micro_batch_tokens=600", "data.max_prompt_tokens=400", "rollout.max_response_tokens=700")
    cp = ("parallel.cp=2", "cluster.gpus_per_node=2")
    assert load_config(RlConfig, RL, [*tokens, *cp]).max_sequence_tokens == 1100
    with pytest.raises(ConfigError, match=r"= 1100 does not fit a micro-batch"):
        load_config(RlConfig, RL, list(tokens))


def test_resolved_config_reads_back_equal(tmp_path: Path):
    run = load_config(RlConfig, RL, ["verl_overrides.trainer.balance_batch=false"])
    assert run.verl_overrides == {"trainer.balance_batch": False}
    copy = tmp_path / "config.toml"
    copy.write_text(run.to_toml())
    assert load_config(RlConfig, copy).model_dump() == run.model_dump()


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(case["settings"]))
def test_a_wrong_setting_is_one_clear_error(case: dict[str, Any]):
    kind, path = (SftConfig, SFT) if case["run"] == "sft" else (RlConfig, RL)
    with pytest.raises(ConfigError) as caught:
        load_config(kind, path, case["settings"])
    assert case["message"] in str(caught.value) and "\n" not in str(caught.value)
    assert str(path) in str(caught.value) or "command line" in str(caught.value) or "section.key=" in str(caught.value)


def test_what_those_rules_allow_loads():
    """So that none of them refuses more than it says."""
    fused = ("memory.fused_cross_entropy=true", "parallel.tp=2")
    assert load_config(SftConfig, SFT, fused).dp == 1
    assert load_config(SftConfig, SFT, ["parallel.vpp=2", "parallel.pp=2"]).dp == 1
    assert load_config(SftConfig, SFT, ["parallel.ep=2"]).parallel.ep == 2
    whole = load_config(SftConfig, SFT, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=1"]).parallel
    assert (whole.expert_tp, Parallel(tp=2).expert_tp) == (1, 2), "over the ranks of tp, too; as tp where it is not set"
    with pytest.raises(ConfigError, match=r"etp \* ep = 2 \* 2 = 4 does not divide the 2 ranks"):
        load_config(SftConfig, SFT, ["parallel.tp=2", "parallel.ep=2"])
    aux = ("memory.recompute=auto", "experts.load_balancing={aux_loss=0.1}")
    assert load_config(SftConfig, SFT, aux).experts.load_balancing == {"aux_loss": 0.1}
    assert load_config(RlConfig, RL, ["algorithm.router_replay=R3", "algorithm.old_log_prob=rollout"]).dp == 1
    full = load_config(SftConfig, SFT, ["memory.recompute=2"])
    assert full.memory.recomputes_layers and full.memory.recomputed_layers == 2
    for name in ("ppo", "reinforce_plus_plus"):
        assert load_config(RlConfig, RL, [f"algorithm.name={name}", "rollout.group_size=1"]).rollout.group_size == 1
    own_reward = ["reward.function=mine:score", "reward.workers=2", "reward.timeout_s=3"]
    assert load_config(RlConfig, RL, own_reward).reward.function == "mine:score"
    assert load_config(RlConfig, RL, ["cluster.gpus_per_node=4", "train.mini_batch_prompts=3"]).dp == 4


def test_validation_samples_as_the_rollout_where_it_says_nothing_itself():
    rollout = ["rollout.group_size=6", "rollout.temperature=0.7"]
    alike = load_config(RlConfig, RL, rollout).validation
    assert (alike.n, alike.temperature, alike.top_p) == (6, 0.7, 1.0)
    own = load_config(RlConfig, RL, [*rollout, "validation.n=30", "validation.temperature=0", "validation.top_p=0.6"])
    assert (own.validation.n, own.validation.temperature, own.validation.top_p) == (30, 0.0, 0.6)
    assert (own.rollout.group_size, own.rollout.temperature, own.rollout.top_p) == (6, 0.7, 1.0)
    assert load_config(RlConfig, RL, ["validation.every=0"]).validation.temperature == 1.0, "[rollout]'s default"


def test_a_missing_or_broken_file_is_one_clear_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(SftConfig, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"rl_tiny_gpu\.toml: .*; did you mean .*configs/rl_tiny_cpu\.toml\?"):
        load_config(RlConfig, RL.with_name("rl_tiny_gpu.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(SftConfig, broken)
    broken.write_text("")
    with pytest.raises(ConfigError, match=r"broken\.toml has no settings\. Start from a file of configs/"):
        load_config(RlConfig, broken)


def test_a_file_of_the_other_kind_names_the_command_that_takes_it():
    with pytest.raises(ConfigError, match=rf"is an SFT config.*`retool sft {SFT}`\?$"):
        load_config(RlConfig, SFT)
    with pytest.raises(ConfigError, match=rf"is an RL config.*`retool rl {RL}`\?$"):
        load_config(SftConfig, RL)


def test_a_file_that_an_editor_began_with_a_mark_is_read(tmp_path: Path):
    marked = tmp_path / "run.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + RL.read_bytes())
    assert load_config(RlConfig, marked).train == load_config(RlConfig, RL).train
    assert isinstance(load_run(marked), RlConfig)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[run]\nname = 'a'\n".encode("utf-16"), "is not TOML: it is UTF-16. Save it as UTF-8"),
        (b'{"run": {"name": "a"}}', "is not TOML: it is JSON. A run file has sections"),
        (b"#!/bin/bash\npython3 -m verl.trainer.main_ppo\n", "is not TOML: it is a script or YAML. .* from-verl"),
        (b"\x7fELF\0\0", "is not TOML: it is a binary file"),
    ],
)
def test_a_file_that_is_no_run_file_is_named_for_what_it_is(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "run"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(RlConfig, file)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=200", "optim.lr = 200: must be at most 1 (command line)."),
        ("train.steps='5'", 'train.steps = "5": expected a whole number, without quotes (command line).'),
        ("validation.before=1", "validation.before = 1: expected true or false, without quotes (command line)."),
        ("run.name=5", 'run.name = 5: expected a string, in quotes: "..." (command line).'),
        ("rollout=5", "'rollout=5' is not of the form section.key=value, for example train.steps=100"),
        ("algorithm.name=gae", 'algorithm.name = "gae" is verl\'s name. Write algorithm.name = "ppo" (command line).'),
        ("checkpoint.resume=True", "checkpoint.resume=True: True is Python, not TOML. Write true."),
        ("checkpoint.resume=None", "checkpoint.resume=None: None is Python, not TOML. Leave the setting out instead."),
    ],
)
def test_an_error_begins_with_the_problem_and_says_what_to_write(override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(RlConfig, RL, [override, "run.seed=1"])
    assert str(caught.value) == message


def test_the_origin_is_the_file_where_the_command_line_does_not_set_the_value(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(RL.read_text(encoding="utf-8").replace("steps = ", "steps = -"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(RlConfig, file, ["run.seed=1"])
    assert str(caught.value).endswith(f"must be more than 0 ({file}).") and "run.seed" not in str(caught.value)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    run = load_config(RlConfig, RL, ["run.root=~/runs", 'validation.files=["~/data/a.parquet"]'])
    assert (run.run.root, run.validation.files) == ("/home/me/runs", ["/home/me/data/a.parquet"])
