"""`retool config --explain`."""

import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner, Result

from retool_mcore.cli.main import all_commands
from retool_mcore.config import RlConfig, SftConfig

TABLES = tomllib.loads(Path(__file__).with_name("explained.toml").read_text(encoding="utf-8"))


def keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += keys(inner, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def explain(*words: str) -> Result:
    return CliRunner().invoke(all_commands(), ["config", "--explain", *words])


def heads(*words: str) -> list[str]:
    """The lines that name a section or a key; all others are indented."""
    result = explain(*words)
    assert result.exit_code == 0, result.output
    return [line for line in result.output.splitlines() if line and not line.startswith(" ")]


def names(*words: str) -> list[str]:
    return [head.partition(":")[0] for head in heads(*words)]


def test_all_keys_are_printed_and_no_line_is_longer_than_100():
    both = {*keys(SftConfig), *keys(RlConfig)} - {"source"}
    found = names()
    assert {name for name in found if not name.startswith("[")} == both
    assert {name.strip("[]") for name in found if name.startswith("[")} == {
        key.partition(".")[0] for key in both if "." in key
    }
    lines = explain().output.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in "".join(lines), "no colours when it is piped"


@pytest.mark.parametrize(("run", "kind"), [("sft", SftConfig), ("rl", RlConfig)])
def test_a_kind_of_run_has_its_own_keys(run: str, kind: type[SftConfig | RlConfig]):
    found = [name for name in names("--run", run) if not name.startswith("[")]
    assert found == [key for key in keys(kind) if key != "source"]


def test_a_section_is_its_explanation_and_its_keys():
    assert names("critic") == names("[critic]") == ["[critic]", "critic.lr", "critic.warmup_steps"]
    assert "PPO's value model" in explain("critic").output
    assert names("verl_overrides") == ["verl_overrides"]


@pytest.mark.parametrize("head", TABLES["key"])
def test_a_key_is_its_type_its_default_the_runs_that_have_it_and_its_explanation(head: str):
    first, *explanation = explain(head.partition(":")[0]).output.splitlines()
    assert first == head
    assert explanation and all(line.startswith("    ") for line in explanation)


@pytest.mark.parametrize("row", TABLES["unknown"], ids=lambda row: row[0])
def test_an_unknown_name_is_one_clear_error(row: list[str]):
    result = explain(*row[:-1])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(row[-1]) and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_the_option_may_be_left_out_and_several_names_given():
    said = CliRunner().invoke(all_commands(), ["config", "parallel.tp", "rollout.gpus=2"])
    assert said.exit_code == 0 and said.output.count("a whole number") == 2, said.output
    assert "parallel.tp: " in said.output and "rollout.gpus: " in said.output


@pytest.mark.parametrize("words", [["nope.toml"], ["configs/rl_tiny_cpu.toml", "train.steps=3"]])
def test_a_run_file_is_told_from_a_key(words: list[str]):
    said = CliRunner().invoke(all_commands(), ["config", *words])
    assert said.exit_code == 2
    assert f"{words[0]} is a run file, but this command explains keys" in said.output
