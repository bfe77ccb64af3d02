"""Reading, sampling and the file itself, without a browser. run/ is of a real quickstart."""

import base64
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.errors import ConfigError, DataError
from retool_mcore.report.view.page import chart_of, highlighted, millinats, pack, sample, write_page
from retool_mcore.report.view.sources import RecordRow, open_source
from tests.unit.report.generated import write_run

RUN = Path(__file__).parents[3] / "report/view/run"
RECORDS = RUN / "trajectories/trajectories.jsonl"


def parts(page: Path) -> tuple[dict[str, Any], list[Any]]:
    text = page.read_text(encoding="utf-8")
    packed = re.findall(r'id="(index|chunk-\d+)" type="application/octet-stream">([^<]*)<', text)
    values = [json.loads(gzip.decompress(base64.b64decode(body))) for _, body in packed]
    return values[0], values[1:]


def unpacked(letters: str) -> list[int | None]:
    codes = [ord(letter) - 0x5D for letter in letters]
    return [None if code < 0 else -(code + 1) // 2 if code % 2 else code // 2 for code in codes]


@given(st.lists(st.floats(-27, 27) | st.just(math.nan) | st.just(-math.inf)))
def test_millinats_are_read_back_and_can_be_written(values: list[float]):
    letters = millinats(values)
    assert unpacked(letters) == [round(1000 * value) if math.isfinite(value) else None for value in values]
    assert len(letters.encode()) <= 3 * len(values)  # no surrogate


def test_every_record_of_a_run_is_in_its_page(tmp_path: Path):
    write_page([open_source(RUN)], tmp_path / "view.html", limit=10_000)
    index, chunks = parts(tmp_path / "view.html")
    records = {row["key"]: row for row in map(json.loads, RECORDS.read_text().splitlines())}
    assert sorted(row["id"] for row in index["rows"]) == sorted(records)
    for row in index["rows"]:
        one, record = chunks[row["chunk"]][row["place"]], records[row["id"]]
        assert one["ids"] == record["response_ids"]
        assert [value for value, count in one["mask"] for _ in range(count)] == record["loss_mask"]
        gap = [a - e for a, e in zip(record["actor_logprobs"], record["logprobs"], strict=True)]
        assert unpacked(one["gap"]) == [round(1000 * value) for value in gap]
        assert unpacked(one["logprobs"]) == [round(1000 * value) for value in record["logprobs"]]
    texts = index["sources"][0]["texts"]
    assert "\\boxed{" in "".join(texts[str(token)] for token in records[index["rows"][0]["id"]]["response_ids"])


def test_events_are_those_of_the_rows(tmp_path: Path):
    steps = [
        {"step": 1, "timing_s/start": 9.0},
        {"step": 2, "timing_s/save_checkpoint": 1.0, "timing_s/update_weights": 0.1},
    ]
    steps.append({"step": 3, "timing_s/start": 8.0})
    run = write_run(tmp_path / "run", rows=steps)
    assert open_source(run).events == [(2, "checkpoint"), (2, "weight sync"), (3, "resume")]


def rows(groups: dict[str, list[bool]], step: int = 1) -> list[RecordRow]:
    return [
        RecordRow(path=Path("x/y"), offset=0, step=step, partition="train", id=f"{name}_{at}", group=name, right=right,
            reward=float(right))
        for name, rights in groups.items() for at, right in enumerate(rights)
    ]  # fmt: skip


def test_a_sample_has_whole_groups_of_every_stratum():
    many = {f"mixed{number}": [True, False] for number in range(50)}
    everything = [*rows(many | {"none": [False, False], "all": [True, True]}), *rows({"late": [True, False]}, step=2)]
    chosen = sample(everything, 12)
    assert len(chosen) == 12
    names = [row.group for row in chosen]
    assert {"none", "all", "late"} <= set(names)
    assert all(names.count(name) == 2 for name in names), "whole groups"
    assert chosen == sample(everything, 12)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x89PNG\r\n\x1a\n\x00", "line 1: "),
        (b'{"problem": "1+1"}\n', "line 1: turns: Field required"),
        (b'{"turns": [], "response_ids": [1, 2], "loss_mask": [1]}\n', "loss_mask is not a list of 2 values"),
        (b"", "no complete record"),
    ],
)
def test_a_file_without_a_record_is_one_clear_error(tmp_path: Path, content: bytes, says: str):
    file = tmp_path / "file.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(says)):
        open_source(file)
    told = CliRunner().invoke(all_commands(), ["view", str(file), "--out", str(tmp_path / "out.html")])
    assert told.exit_code == 2
    assert not (tmp_path / "out.html").exists()


WHOLE = {
    "turns": [{"text": "a", "results": [{"ok": True, "code": "1", "shown": "1", "run_s": 0.1}]}],
    "response_ids": [1, 2],
    "logprobs": [-0.5, float("nan")],
    "loss_mask": [1, 1],
    "step": 1,
    "key": "a_0_0",
    "reward_info": {"acc": 1.0, "own": float("inf")},
}
DAMAGE = Path(__file__).with_name("damaged.jsonl").read_text(encoding="utf-8").splitlines()  # values of a record


def test_damaged_records_are_left_out_and_counted(tmp_path: Path):
    lines = [json.dumps(WHOLE | {"key": "first_0_0"}), *(json.dumps(WHOLE | json.loads(damage)) for damage in DAMAGE)]
    lines += ["[]", "null", "1", '"text"', "{", '{"turns": ' + "[" * 100_000, json.dumps(WHOLE)]
    file = tmp_path / "file.jsonl"
    file.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    source = open_source(file)
    assert [row.id for row in source.rows] == ["first_0_0", "a_0_0"]
    assert len(source.skipped) == len(DAMAGE) + 7
    done = CliRunner().invoke(all_commands(), ["view", str(file), "--out", str(tmp_path / "out.html")])
    assert done.exit_code == 0, done.output
    assert f"file: {len(DAMAGE) + 7} damaged records are skipped; the first is {file}, line 2: step" in " ".join(
        done.stderr.split()
    )
    assert "2 trajectories" in done.stdout


@pytest.mark.parametrize(
    ("kind", "groups", "file", "reason"),
    [
        ("rl", 0, None, "rollout.record_groups = 0"),
        ("rl", 2, "", "the files in trajectories/ are empty"),
        ("rl", 2, None, "no files in trajectories/"),
        ("sft", 0, None, "supervised fine-tuning samples no trajectories"),
    ],
)
def test_a_run_without_trajectories_names_the_reason(
    tmp_path: Path, kind: str, groups: int, file: str | None, reason: str
):
    sections = {"rollout": {"record_groups": groups}} if kind == "rl" else {}
    run = write_run(tmp_path / "run", kind=kind, rows=[{"step": 1, "loss": 2.0}], **sections)
    if file is not None:
        (run / "trajectories").mkdir()
        (run / "trajectories/trajectories.jsonl").write_text(file)
    source = open_source(run)
    assert reason in source.why
    assert [row["loss"] for row in source.metrics] == [2.0]
    assert source.models[:2] == ("models/start", str(run / "export")), "tokenizers, best first"


def test_a_chart_has_the_reports_title_and_the_unit_of_the_table_of_metrics():
    reward, other = chart_of("critic/rewards/mean"), chart_of("tool/latency_s/p99")
    assert (reward["title"], reward["zero"]) == ("Reward", False) and "mean of the" in reward["meaning"]
    assert (other["title"], other["unit"], other["zero"]) == ("tool/latency_s/p99", "s", None)
    assert chart_of("of/another/version")["unit"] == ""


def test_a_step_that_was_not_recorded_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="--step 999"):
        write_page([open_source(RUN)], tmp_path / "view.html", steps=[999], limit=10)


def test_what_a_model_wrote_cannot_leave_its_chunk():
    packed = pack(["</script><script>alert(1)</script>", "\ud800"])
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)


def test_highlighted_code_is_the_code():
    code = "for i in range(3):\n    print('</script>', i)  # x\n"
    assert "".join(text for _, text in highlighted(code)) == code
    assert ("k", "for") in highlighted(code)
