"""SGLang, too, stops by itself where the template ends a turn."""

from pathlib import Path

import httpx
import pytest
import torch

from retool_mcore.platforms import get_platform
from retool_mcore.rollout.server import SglangServer
from tests.sglang_client import access
from tests.unit.run.test_export_ends import base, exported, values  # noqa: F401  a fixture


@pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
def test_sglang_too_stops_by_itself_where_the_template_ends_a_turn(tmp_path: Path, base: Path):
    made = exported(tmp_path, base)
    turn_end = values(made / "config.json")["eos_token_id"]
    request = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0, "max_new_tokens": 50}}
    with (
        SglangServer(
            made, get_platform("cpu"), dtype="float32", log_path=tmp_path / "log", max_running_requests=4
        ) as server,
        httpx.Client(**access(server)) as client,
    ):
        answer = client.post("/generate", json=request).raise_for_status().json()
    assert answer["output_ids"] == [turn_end]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": turn_end}
