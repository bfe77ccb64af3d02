"""`retool config --explain`."""

import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.config import RlConfig, SftConfig

TABLES = tomllib.loads(Path(__file__).with_name("explained.toml").read_text(encoding="utf-8"))


def keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += keys(inner, f"{prefix}{name}.")
        elif name != "source":
            found.append(f"{prefix}{name}")
    return found


def explained(*words: str) -> list[str]:
    result = CliRunner().invoke(all_commands(), ["config", *words])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def names(*words: str) -> list[str]:
    """The sections and keys that are named; all other lines are indented."""
    lines = explained("--explain", *words)
    return [line.partition(":")[0] for line in lines if line and not line.startswith(" ")]


def test_a_kind_of_run_has_its_own_keys_and_all_are_printed_without_one():
    for run, kind in (("sft", SftConfig), ("rl", RlConfig)):
        assert [name for name in names("--run", run) if not name.startswith("[")] == keys(kind)
    both = {*keys(SftConfig), *keys(RlConfig)}
    assert set(names()) == both | {f"[{key.partition('.')[0]}]" for key in both if "." in key}


def test_a_section_is_its_explanation_and_its_keys():
    assert names("critic") == names("[critic]") == ["[critic]", "critic.lr", "critic.warmup_steps"]
    assert "PPO's value model" in " ".join(explained("critic"))


@pytest.mark.parametrize("head", TABLES["key"])
def test_a_key_is_its_type_its_default_the_runs_that_have_it_and_its_explanation(head: str):
    first, *explanation = explained("--explain", head.partition(":")[0])
    assert first == head
    assert explanation and all(line.startswith("    ") for line in explanation)


@pytest.mark.parametrize("row", TABLES["unknown"], ids=lambda row: row[0])
def test_an_unknown_name_is_one_clear_error(row: list[str]):
    result = CliRunner().invoke(all_commands(), ["config", "--explain", *row[:-1]])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(row[-1]) and result.stderr.count("\n") == 1


def test_several_names_may_be_given():
    said = "\n".join(explained("parallel.tp", "rollout.gpus=2"))
    assert "parallel.tp: " in said and "rollout.gpus: " in said
