"""What a user's machine has around a run: proxies, hidden files, libraries that talk at exit."""

import os
import socket
from pathlib import Path

import httpx
import pytest

from retool_mcore.config.files import parquet_files
from retool_mcore.data.files import source_files
from retool_mcore.errors import DataError
from retool_mcore.process import bypass_proxy


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_dead_proxy_is_not_asked_for_this_node(monkeypatch, name: str):
    for own in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(own, raising=False)
    monkeypatch.setenv("no_proxy", "theirs.example")
    monkeypatch.setenv("NO_PROXY", "more.example, theirs.example,")
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    bypass_proxy()
    own = ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
    assert os.environ["no_proxy"].startswith(",".join(dict.fromkeys(("theirs.example", "more.example", *own))))
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
    assert source_files(str(tmp_path)) == [tmp_path / "a.parquet"]


def test_a_folder_and_a_pattern_name_their_files_in_order_and_a_file_itself(tmp_path: Path):
    files = [str(tmp_path / f"{name}.parquet") for name in ("[x]", "a", "b", "sub/c", "sub/._d")]
    (tmp_path / "sub").mkdir()
    (tmp_path / "empty").mkdir()
    for file in reversed(files):
        Path(file).write_text("")
    assert parquet_files(str(tmp_path)) == files[:3]
    assert parquet_files(f"{tmp_path}/**/*.parquet") == files[:4]
    assert parquet_files(files[0]) == files[:1], "not the pattern that it looks like"
    assert parquet_files("absent.parquet") == ["absent.parquet"], "its reader reports it"
    for nothing in ("empty", "b*.parq", "sub/._*.parquet"):
        with pytest.raises(DataError, match=f"{nothing[:3]}.*: no parquet file found"):
            parquet_files(str(tmp_path / nothing))
