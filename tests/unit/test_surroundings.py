"""What a user's machine has around a run: proxies, hidden files, libraries that talk at exit."""

import os
from pathlib import Path

import httpx
import pytest

from retool_mcore.config.files import parquet_files
from retool_mcore.data.files import source_files
from retool_mcore.process import bypass_proxy


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_dead_proxy_is_not_asked_for_this_node(monkeypatch, name: str):
    for own in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(own, raising=False)
    monkeypatch.setenv("no_proxy", "theirs.example")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    bypass_proxy()
    assert os.environ["no_proxy"].startswith("theirs.example,localhost,127.0.0.1")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    import http.server
    import threading

    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert httpx.get(f"http://127.0.0.1:{server.server_port}/").status_code == 501
    finally:
        server.shutdown()
        server.server_close()


def test_hidden_files_are_not_data(tmp_path: Path):
    for name in ("a.parquet", "._a.parquet", ".ipynb_checkpoints/a.parquet", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert parquet_files(str(tmp_path)) == [str(tmp_path / "a.parquet")]
    assert parquet_files(str(tmp_path / ".*.parquet")[:-10] + "[._a]*.parquet") == [str(tmp_path / "a.parquet")]
    assert source_files(str(tmp_path)) == [tmp_path / "a.parquet"]
