"""`retool rollout` against a running server."""

import json
from pathlib import Path

from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands


def test_rollout_writes_one_line_for_each_trajectory(server, model_dir: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"problem": "1 + 1?"}, {"messages": [{"role": "user", "content": "2 + 2?"}]}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    words = ["rollout", "--url", server.url, "--model", str(model_dir), "--prompt-file", str(prompts)]
    options = ["--out", str(out), "--n", "3", "--max-response-tokens", "60"]
    done = CliRunner().invoke(all_commands(), [*words, *options])
    assert done.exit_code == 0, done.output
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((row["prompt"], row["sample"]) for row in written) == [(p, k) for p in range(2) for k in range(3)]
    for row in written:
        columns = (row["response_ids"], row["loss_mask"], row["logprobs"], row["versions"])
        assert len({len(column) for column in columns}) == 1
        assert 0 < len(row["response_ids"]) <= 60
