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
from retool_mcore.report.panels import BEHAVIOUR, LEARNING, SPEED
from retool_mcore.report.view.page import Written, chart_of, highlighted, millinats, pack, sample, write_page
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
    later = write_run(tmp_path / "later", rows=steps[2:])  # its first rows are lost
    assert open_source(later).events == [(3, "resume")]


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


def test_a_row_and_a_page_of_a_trajectory_have_what_its_record_says(tmp_path: Path):
    file = Path(__file__).with_name("records.jsonl")  # the last was cut by a kill
    record = json.loads(file.read_text("utf-8").splitlines()[0])
    source = open_source(file)
    assert source.skipped == []
    written = write_page([source], tmp_path / "view.html", limit=10)
    assert written == Written(shown=4, found=4, without_tokenizer=["records"], without_tokens=[])
    index, chunks = parts(tmp_path / "view.html")
    assert [(row["id"], row["right"], row["reward"], row["chunk"], row["place"]) for row in index["rows"]] == [
        ("2-2", True, 1.0, 0, 0),
        ("10-2", False, 0.0, 0, 1),
        ("prompt_7_1", False, -0.5, 1, 0),
        ("val:v_0_0", True, 1.0, 2, 0),
    ]
    assert index["rows"][2] == {
        **{"source": 0, "chunk": 1, "place": 0, "id": "prompt_7_1", "step": 5, "partition": "train"},
        **{"group": "prompt", "right": False, "reward": -0.5, "truth": "2", "extracted": "3"},
        **{"stop": "malformed_calls", "turns": 2, "calls": 2, "failed": 1, "repairs": 1, "malformed": 1},
        **{"errors": "ZeroDivisionError malformed/json", "gap": 0.5, "lines": 3, "tokens": 4},
        **{"seconds": 4.5, "tool_s": 1.75, "stale": 2, "problem": "What is 1 + 1?"},
    }
    (one,) = chunks[1]
    assert unpacked(one.pop("logprobs")) == [-500, -1000, 0, -2000]
    assert unpacked(one.pop("gap")) == [250, 0, -7000, -500]
    first, second = record["turns"]
    results = [{**first["results"][0], "code": [["mi", "1"], ["o", "/"], ["mi", "0"]]}, {"ok": True, "code": []}]
    assert one == {
        **{"prompt": record["prompt"], "prompt_tokens": 3, "ids": [1, 2, 3, 4], "mask": [[1, 2], [0, 1], [1, 1]]},
        **{"versions": [[3, 2], [-1, 1], [2, 1]], "advantage": 0.75, "truth": "2", "extracted": "3"},
        **{"drop_error": None, "reward_info": {"acc": 0.0, "score": 1.0, "own": None}},
        **{"started": 12.0, "wall_s": 4.5},
        "turns": [{**first, "unseen": False, "results": results}, {**second, "unseen": True, "results": []}],
    }
    assert write_page([source], tmp_path / "view.html", steps=[5], limit=1).found == 2
    index, _ = parts(tmp_path / "view.html")
    assert (index["shown"], index["found"], index["steps"], [row["step"] for row in index["rows"]]) == (1, 2, [5], [5])


def test_rotated_files_are_read_from_the_oldest_and_a_folder_names_what_is_in_it(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "trajectories").mkdir()
    for name in ("a", "a.1", "a.2", "a.10"):
        (run / "trajectories" / f"{name}.jsonl").write_text(json.dumps(WHOLE | {"key": f"{name}_0_0"}) + "\n")
    assert [row.group for row in open_source(run).rows] == ["a.10", "a.2", "a.1", "a"]
    evaluated = tmp_path / "eval"
    evaluated.mkdir()
    (evaluated / "samples.jsonl").write_text('{"turns": [], "problem": 3, "sample": 1, "correct": true}\n')
    (evaluated / "settings.json").write_text('{"model": "m"}')
    with pytest.raises(DataError, match=r"neither a run .* It contains eval, run\. Name one of these"):
        open_source(tmp_path)
    source = open_source(evaluated)
    assert (source.name, source.kind, source.models) == ("eval (evaluation)", "eval", ("m",))
    assert [(row.id, row.group, row.right, row.reward) for row in source.rows] == [("3-1", "3", True, 1.0)]


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
    charts = [name for panel in (*LEARNING, *BEHAVIOUR, *SPEED) for name, _ in panel.lines]
    assert [name for name in charts if not chart_of(name)["meaning"]] == []


def test_a_step_that_was_not_recorded_is_refused(tmp_path: Path):
    file = tmp_path / "file.jsonl"
    file.write_text("".join(json.dumps(WHOLE | {"step": step}) + "\n" for step in (3, 1, 7, 2, 5, 1)))
    with pytest.raises(ConfigError, match=r"--step 4 9: no traj.*Recorded steps: 1 to 3, 5, 7\."):
        write_page([open_source(file)], tmp_path / "view.html", steps=[4, 9], limit=10)


def test_what_a_model_wrote_cannot_leave_its_chunk():
    packed = pack(["</script><script>alert(1)</script>", "\ud800"])
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)


def test_highlighted_code_is_the_code():
    code = "for i in range(3):\n    print('</script>', i)  # x\n"
    assert "".join(text for _, text in highlighted(code)) == code
    assert ("k", "for") in highlighted(code)
