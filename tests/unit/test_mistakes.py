"""Mistakes on the command line: each is one line with the value, the rule and what to do."""

import json
import os
import shutil
import tomllib
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import SafetensorError
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.run.folder import lock_run

ROOT = Path(__file__).parents[2]
RL = ROOT / "configs/rl_tiny_cpu.toml"
GSM8K = ROOT / "tests/data/samples/gsm8k_60.jsonl"
RUN = ROOT / "tests/report/view/run"
EVAL = f"eval --endpoint http://127.0.0.1:9/v1 --model m --data {GSM8K} --limit 1"
PLACES = {"RL": str(RL), "RUN": str(RUN), "GSM8K": str(GSM8K), "EVAL": EVAL}
CASES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))["case"]


@pytest.fixture(autouse=True)
def no_stage_lasts(monkeypatch: pytest.MonkeyPatch):
    """A slow machine must not add a stage's line to the log."""
    monkeypatch.setattr("retool_mcore.run.status.SLOW_AFTER_S", 600.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    (made / "file").write_text("")
    (made / "m.gguf").write_bytes(b"GGUF")
    shutil.copy(GSM8K, made / "mine.jsonl")
    for name in ("a", "b"):
        shutil.copy(GSM8K, made / f"{name}.parquet")
    (made / "loop.toml").symlink_to("loop.toml")
    (made / "empty").mkdir()
    pq.write_table(
        pa.table({"response": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), made / "none.parquet"
    )
    pq.write_table(pa.table({"response": ["\\boxed{3}"]}), made / "other.parquet")
    (made / "cut.parquet").write_bytes((made / "other.parquet").read_bytes()[:-20])
    return made


@pytest.mark.parametrize(("words", "message"), CASES)
def test_a_mistake_is_one_line(words: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    for name, value in PLACES.items():
        words = words.replace(f"{{{name}}}", value)
    spelt = [word.replace("&&&", "\n").replace("&", " ") for word in words.split()]
    done = CliRunner().invoke(all_commands(), spelt)
    assert done.exit_code == 2, done.exception or done.output
    assert message in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert "━" not in done.stdout, "a bar of nothing stands before it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{RL} rl", f"The command comes first: retool rl {RL}"),
        (f"get {RL} --train.steps=3", "No such option: --train.steps. A setting has no dashes: train.steps=VALUE"),
        ("sandbox serve --port 99999", "Invalid value for '--port'"),
        ("sandbox serve --workers 0", "Invalid value for '--workers'"),
        (f"score {GSM8K} --out s.jsonl --timeout-s -1", "Invalid value for '--timeout-s'"),
    ],
)
def test_words_in_the_wrong_place_and_numbers_out_of_range_are_told(words: str, message: str):
    done = CliRunner().invoke(all_commands(), words.split(), prog_name="retool")
    assert done.exit_code == 2 and message in done.stderr, done.output


def test_responses_in_parquet_are_scored(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    rows = [{"response": text, "answer": "3", "when": datetime(2026, 1, 2)} for text in ("\\boxed{3}", "4")]
    pq.write_table(pa.Table.from_pylist(rows), "two.parquet")
    done = CliRunner().invoke(all_commands(), ["score", "two.parquet", "--out", "scored.jsonl"])
    assert done.exit_code == 0, done.exception or done.output
    scored = [json.loads(line) for line in Path("scored.jsonl").read_text().splitlines()]
    day = "2026-01-02 00:00:00"
    assert [(row["correct"], row["when"]) for row in scored] == [(True, day), (False, day)]


@pytest.mark.parametrize(("command", "config"), [("sft", "sft_tiny_cpu"), ("rl", "rl_tiny_cpu")])
def test_a_second_start_is_told_at_once_that_the_folder_is_in_use(command: str, config: str, tmp_path: Path):
    """Nothing else was looked at before, and no process started."""
    argv = [command, str(ROOT / "configs" / f"{config}.toml"), f"run.root={tmp_path}", "run.name=mine"]
    with lock_run(tmp_path / "mine"):
        done = CliRunner().invoke(all_commands(), argv)
    assert done.exit_code == 2, done.exception or done.output
    assert done.stderr.startswith(f"error: {tmp_path}/mine is in use by process {os.getpid()} on ")
    assert done.stderr.endswith("Wait for it, stop it, or set another run.name.\n") and done.stderr.count("\n") == 1


def test_a_librarys_own_error_of_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("retool_mcore.data.tasks.write_model", full)
    done = CliRunner().invoke(all_commands(), ["data", "task", str(tmp_path / "made")])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.exception
    assert done.stderr.startswith("error: no space is left. Complete files are kept. Free some space")
