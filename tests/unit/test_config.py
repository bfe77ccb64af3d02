"""A configuration is strict, complete and says what is wrong with it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import Parallel, RlConfig, SftConfig, load_config, load_run
from retool_mcore.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
SFT, RL = CONFIGS / "sft_tiny_cpu.toml", CONFIGS / "rl_tiny_cpu.toml"
KINDS = {"sft": (SftConfig, SFT), "rl": (RlConfig, RL)}
ROWS = tomllib.loads(Path(__file__).with_name("wrong_settings.toml").read_text(encoding="utf-8"))


def rows(ending: str = "") -> list[Any]:
    return [pytest.param(run, row, id=" ".join(row)) for run in KINDS for row in ROWS[run + ending]]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_config_loads(path: Path):
    kind = SftConfig if path.name.startswith("sft_") else RlConfig
    assert load_config(kind, path).run.name == path.stem


def test_resolved_config_reads_back_equal(tmp_path: Path):
    run = load_config(RlConfig, RL, ["verl_overrides.trainer.balance_batch=false"])
    assert run.verl_overrides == {"trainer.balance_batch": False}
    copy = tmp_path / "config.toml"
    copy.write_text(run.to_toml())
    assert load_config(RlConfig, copy).model_dump() == run.model_dump()


@pytest.mark.parametrize(("run", "row"), rows())
def test_a_wrong_setting_is_one_clear_error(run: str, row: list[str]):
    *settings, message = row
    with pytest.raises(ConfigError) as caught:
        load_config(*KINDS[run], settings)
    said, path = str(caught.value), str(KINDS[run][1])
    assert message in said and "\n" not in said
    assert path in said or "command line" in said or "section.key=" in said


@pytest.mark.parametrize(("run", "row"), rows("_allowed"))
def test_what_those_rules_allow_loads(run: str, row: list[str]):
    load_config(*KINDS[run], row)


def test_ranks_layers_and_experts_are_counted_as_the_settings_say():
    layout = ("cluster.nodes=6", "parallel.tp=3", "parallel.pp=2", "train.global_batch=6", "parallel.ep=2")
    run = load_config(SftConfig, SFT, [*layout, "parallel.etp=1", "memory.recompute=2"])
    assert (run.cluster.num_gpus, run.parallel.model_parallel, run.dp) == (12, 6, 2)
    assert (run.parallel.expert_tp, Parallel(tp=2).expert_tp) == (1, 2), "as tp where it is not set"
    assert run.memory.recomputes_layers and run.memory.recomputed_layers == 2
    auto = load_config(SftConfig, SFT, ["memory.recompute=auto"]).memory
    assert not auto.recomputes_layers and auto.recomputed_layers == 0
    rl = load_config(RlConfig, RL, ["algorithm.filter_groups=3", "train.mini_batch_prompts=4", "cluster.nodes=2"])
    assert (rl.algorithm.max_refill_batches, RlConfig.model_fields["algorithm"].default.max_refill_batches) == (3, 10)
    assert (rl.train.updates_per_step, rl.serving_gpus(), rl.num_steps) == (3, 2, 24)
    assert rl.validation_interval == ("validation.every", 24) and rl.saved_every == 8


def test_validation_samples_as_the_rollout_where_it_says_nothing_itself():
    rollout = ["rollout.group_size=6", "rollout.temperature=0.7"]
    alike = load_config(RlConfig, RL, rollout).validation
    assert (alike.n, alike.temperature, alike.top_p) == (6, 0.7, 1.0)
    own = load_config(RlConfig, RL, [*rollout, "validation.n=30", "validation.temperature=0", "validation.top_p=0.6"])
    assert (own.validation.n, own.validation.temperature, own.validation.top_p) == (30, 0.0, 0.6)
    assert (own.rollout.group_size, own.rollout.temperature, own.rollout.top_p) == (6, 0.7, 1.0)
    assert load_config(RlConfig, RL, ["validation.every=0"]).validation.temperature == 1.0, "[rollout]'s default"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read the configuration .*run\.toml: No such file"),
        (b"[run\n", "is not TOML: Expected"),
        (b"run = 5\n", r"^run = 5: expected a section: \[run\], followed by its settings; cluster is missing: add it"),
        (b"", r"run\.toml has no settings\. Start from a file of configs/"),
        (SFT.read_bytes(), r"is an SFT config.*`retool sft .*`\?$"),
        ("[run]\nname = 'a'\n".encode("utf-16"), "is not TOML: it is UTF-16. Save it as UTF-8"),
        (b'{"run": {"name": "a"}}', "is not TOML: it is JSON. A run file has sections"),
        (b"#!/bin/bash\npython3 -m verl.trainer.main_ppo\n", "is not TOML: it is a script or YAML. .* from-verl"),
        (b"\x7fELF\0\0", "is not TOML: it is a binary file"),
    ],
)
def test_a_file_that_is_no_run_file_is_named_for_what_it_is(tmp_path: Path, content: bytes | None, message: str):
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(RlConfig, file)


def test_a_name_that_is_nearly_right_and_a_file_of_the_other_kind_are_told():
    with pytest.raises(ConfigError, match=r"rl_tiny_gpu\.toml: .*; did you mean .*configs/rl_tiny_cpu\.toml\?"):
        load_config(RlConfig, RL.with_name("rl_tiny_gpu.toml"))
    with pytest.raises(ConfigError, match=rf"is an RL config.*`retool rl {RL}`\?$"):
        load_config(SftConfig, RL)


def test_a_file_that_an_editor_began_with_a_mark_is_read(tmp_path: Path):
    marked = tmp_path / "run.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + RL.read_bytes())
    run = load_run(marked)
    assert isinstance(run, RlConfig) and run.train == load_config(RlConfig, RL).train


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=200", "optim.lr = 200: must be at most 1 (command line)."),
        ("train.steps='5'", 'train.steps = "5": expected a whole number, without quotes (command line).'),
        ("validation.before=1", "validation.before = 1: expected true or false, without quotes (command line)."),
        ("algorithm.name=gae", 'algorithm.name = "gae" is verl\'s name. Write algorithm.name = "ppo" (command line).'),
        ("checkpoint.resume=True", "checkpoint.resume=True: True is Python, not TOML. Write true."),
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
        load_config(RlConfig, file, ["run.seed=-1"])
    assert str(caught.value).startswith("run.seed = -1: must be 0 or more; ")
    assert str(caught.value).endswith(f"; train.steps = -24: must be more than 0 ({file}).")


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    run = load_config(RlConfig, RL, ["run.root=~/runs", 'validation.files=["~/data/a.parquet"]'])
    assert (run.run.root, run.validation.files) == ("/home/me/runs", ["/home/me/data/a.parquet"])
