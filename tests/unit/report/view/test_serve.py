"""The served page: anew when a run has gone on, and for nobody who does not know its address."""

import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from retool_mcore.errors import ConfigError
from retool_mcore.report.view.page import write_page
from retool_mcore.report.view.serve import OWN_PORTS, LivePage, live_app, serve
from retool_mcore.report.view.sources import open_source

RUN = Path(__file__).parents[3] / "report/view/run"
HOST = "127.0.0.1:8000"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def live(run: Path) -> LivePage:
    out = run.parent / "view.html"
    return LivePage([run], out, lambda version: write_page([open_source(run)], out, limit=100, live=version))


def test_the_page_and_its_version_change_with_the_runs_files(run: Path):
    page = live(run)
    client = TestClient(live_app(page, "s3cret", [HOST]), base_url=f"http://{HOST}")
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
    out, metrics = run.parent / "view.html", run / "metrics.jsonl"
    made: list[str] = []

    def write(version: str) -> None:
        made.append(version)
        if len(made) == 2:  # the run goes on meanwhile
            metrics.write_text(metrics.read_text() + '{"step": 26, "reward": 0.5}\n')

    page = LivePage([run], out, write)
    page.newest()
    os.utime(metrics, ns=(0, metrics.stat().st_mtime_ns + 1))
    page.newest()
    page.newest()
    page.newest()
    assert len(made) == len(set(made)) == 3


def test_the_address_is_loopbacks_and_answers_from_when_it_is_told(run: Path, monkeypatch: pytest.MonkeyPatch):
    served: list[str] = []

    class Server:
        def __init__(self, config: Any) -> None:
            pass

        def run(self, sockets: list[socket.socket]) -> None:
            served.append(sockets[0].getsockname()[0])

    def connect(line: str) -> None:
        port = re.search(r":(\d+)/", line)
        assert port is not None
        socket.create_connection(("127.0.0.1", int(port[1])), timeout=300).close()

    monkeypatch.setattr("uvicorn.Server", Server)
    serve(live(run), 0, connect)
    assert served == ["127.0.0.1"]


def test_a_page_has_its_port_again_so_that_a_browser_has_its_notes_again(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    lines: list[str] = []
    for _ in range(2):
        serve(live(run), 0, lines.append)
    ports = [int(found[1]) for line in lines if (found := re.search(r":(\d+)/", line))]
    assert ports[0] == ports[1] and ports[0] in OWN_PORTS
    with socket.create_server(("127.0.0.1", ports[0])):
        serve(live(run), 0, lines.append)
        with pytest.raises(ConfigError, match=rf"--port {ports[0]}: .* Choose another port, or 0"):
            serve(live(run), ports[0], lines.append)
    assert f":{ports[0]}/" not in lines[2]


@pytest.mark.parametrize(
    ("path", "host", "code"),
    [("/s3cret/", HOST, 200), ("/other/", HOST, 404), ("/other/version", HOST, 404), ("/", HOST, 404),
     ("/s3cret/", "evil.example:8000", 404), ("/s3cret/version", "evil.example:8000", 404),
     ("/s3cret/version", "127.0.0.1:9", 404)],
)  # fmt: skip
def test_only_who_has_the_address_by_its_own_name_is_answered(run: Path, path: str, host: str, code: int):
    client = TestClient(live_app(live(run), "s3cret", [HOST]), base_url=f"http://{HOST}")
    answer = client.get(path, headers={"host": host})
    assert answer.status_code == code
    assert code != 200 or answer.headers["referrer-policy"] == "no-referrer"
