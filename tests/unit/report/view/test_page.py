"""Reading, sampling, the file itself, and how it is served. run/ is of a real quickstart."""

import base64
import gzip
import json
import math
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.errors import ConfigError, DataError
from retool_mcore.report.view.page import Written, chart_of, millinats, pack, sample, write_page
from retool_mcore.report.view.serve import OWN_PORTS, LivePage, live_app, serve
from retool_mcore.report.view.sources import RecordRow, open_source
from tests.unit.report.generated import write_run

RUN = Path(__file__).parents[3] / "report/view/run"
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


def parts(page: Path) -> tuple[dict[str, Any], list[Any]]:
    """The index and the chunks of a page."""
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
    lines = (RUN / "trajectories/trajectories.jsonl").read_text().splitlines()
    records = {row["key"]: row for row in map(json.loads, lines)}
    assert sorted(row["id"] for row in index["rows"]) == sorted(records)
    for row in index["rows"]:
        assert chunks[row["chunk"]][row["place"]]["ids"] == records[row["id"]]["response_ids"]
    texts = index["sources"][0]["texts"]
    assert "\\boxed{" in "".join(texts[str(token)] for token in records[index["rows"][0]["id"]]["response_ids"])


def test_events_are_those_of_the_rows(tmp_path: Path):
    steps = [
        {"step": 1, "timing_s/start": 9.0},
        {"step": 2, "timing_s/save_checkpoint": 1.0, "timing_s/update_weights": 0.1},
        {"step": 3, "timing_s/start": 8.0},
    ]
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


def test_damaged_records_are_left_out_and_counted(tmp_path: Path):
    lines = [json.dumps(WHOLE | {"key": "first_0_0"}), *(json.dumps(WHOLE | json.loads(damage)) for damage in DAMAGE)]
    lines += ["[]", "null", "1", '"text"', "{", '{"turns": ' + "[" * 100_000, json.dumps(WHOLE)]
    file = tmp_path / "file.jsonl"
    file.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    assert [row.id for row in open_source(file).rows] == ["first_0_0", "a_0_0"]
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="no complete record"):
        open_source(tmp_path / "empty.jsonl")
    done = CliRunner().invoke(all_commands(), ["view", str(file), "--out", str(tmp_path / "out.html")])
    said = f"file: {len(DAMAGE) + 7} damaged records are skipped; the first is {file}, line 2: step"
    assert done.exit_code == 0 and said in " ".join(done.stderr.split()), done.output
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
    with pytest.raises(ConfigError, match=r"--step 4 9: no traj.*Recorded steps: 0, 5\."):
        write_page([source], tmp_path / "view.html", steps=[4, 9], limit=10)


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
    ("kind", "sections", "reason"),
    [
        ("rl", {"rollout": {"record_groups": 0}}, "rollout.record_groups = 0"),
        ("rl", {}, "no files in trajectories/"),
        ("sft", {}, "supervised fine-tuning samples no trajectories"),
    ],
)
def test_a_run_without_trajectories_names_the_reason(tmp_path: Path, kind: str, sections: dict[str, Any], reason: str):
    run = write_run(tmp_path / "run", kind=kind, rows=[{"step": 1, "loss": 2.0}], **sections)
    source = open_source(run)
    assert reason in source.why
    assert [row["loss"] for row in source.metrics] == [2.0]
    assert source.models[:2] == ("models/start", str(run / "export")), "tokenizers, best first"


def test_a_chart_has_the_reports_title_and_the_unit_of_the_table_of_metrics():
    reward, other = chart_of("critic/rewards/mean"), chart_of("tool/latency_s/p99")
    assert (reward["title"], reward["zero"]) == ("Reward", False) and "mean of the" in reward["meaning"]
    assert (other["title"], other["unit"], other["zero"]) == ("tool/latency_s/p99", "s", None)


def test_what_a_model_wrote_cannot_leave_its_chunk():
    packed = pack(["</script><script>alert(1)</script>", "\ud800"])
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)


HOST = "127.0.0.1:8000"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def live(run: Path) -> LivePage:
    out = run.parent / "view.html"
    return LivePage([run], out, lambda version: write_page([open_source(run)], out, limit=100, live=version))


def client_of(page: LivePage) -> TestClient:
    return TestClient(live_app(page, "s3cret", [HOST]), base_url=f"http://{HOST}")


def test_the_page_and_its_version_change_with_the_runs_files(run: Path):
    client = client_of(live(run))
    first, shown = client.get("/s3cret/version").text, client.get("/s3cret/").text
    assert f'data-live="{first}"' in shown and client.get("/s3cret/version").text == first
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "reward": 0.5}\n')
    second = client.get("/s3cret/version").text
    assert second != first and f'data-live="{second}"' in client.get("/s3cret/").text


def test_a_file_that_is_being_written_leaves_the_page_before(run: Path):
    page = live(run)
    before = page.newest().read_bytes()
    rows = run / "trajectories" / "trajectories.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(b"{}\n")
    assert page.newest().read_bytes() == before
    rows.write_bytes(whole + whole.splitlines(keepends=True)[0])
    assert page.newest().read_bytes() != before


def test_a_change_that_keeps_a_files_size_or_comes_while_the_page_is_written_is_another_version(run: Path):
    metrics = run / "metrics.jsonl"
    made: list[str] = []

    def write(version: str) -> None:
        made.append(version)
        if len(made) == 2:  # the run writes a row at the same time
            metrics.write_text(metrics.read_text() + '{"step": 26, "reward": 0.5}\n')

    page = LivePage([run], run.parent / "view.html", write)
    page.newest()
    os.utime(metrics, ns=(0, metrics.stat().st_mtime_ns + 1))
    for _ in range(3):
        page.newest()
    assert len(made) == len(set(made)) == 3


def test_a_page_listens_on_loopback_and_has_its_port_again(run: Path, monkeypatch: pytest.MonkeyPatch):
    """So that a browser, which keeps the notes by address, has its notes again."""
    served: list[str] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda _, sockets: served.append(sockets[0].getsockname()[0]))
    ports: list[int] = []

    def connect(line: str) -> None:
        ports.append(int(re.findall(r":(\d+)/", line)[0]))
        socket.create_connection(("127.0.0.1", ports[-1]), timeout=300).close()

    for _ in range(2):
        serve(live(run), 0, connect)
    assert served == ["127.0.0.1"] * 2
    assert ports[0] == ports[1] and ports[0] in OWN_PORTS
    with socket.create_server(("127.0.0.1", ports[0])):
        serve(live(run), 0, connect)
        with pytest.raises(ConfigError, match=rf"--port {ports[0]}: .* Choose another port, or 0"):
            serve(live(run), ports[0], connect)
    assert ports[2] != ports[0]


@pytest.mark.parametrize(
    ("path", "host", "code"),
    [("/s3cret/", HOST, 200), ("/other/", HOST, 404), ("/other/version", HOST, 404),
     ("/s3cret/", "evil.example:8000", 404), ("/s3cret/version", "evil.example:8000", 404),
     ("/s3cret/version", "127.0.0.1:9", 404)],
)  # fmt: skip
def test_only_who_has_the_address_by_its_own_name_is_answered(run: Path, path: str, host: str, code: int):
    answer = client_of(live(run)).get(path, headers={"host": host})
    assert answer.status_code == code
    assert code != 200 or answer.headers["referrer-policy"] == "no-referrer"
