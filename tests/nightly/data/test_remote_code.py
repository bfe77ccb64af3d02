"""Code that comes with a model or tokenizer is not run, and nobody is asked at a prompt."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.data.task_model import build_tokenizer, write_model
from tests.scenario import ROOT

READ = "import sys; from retool_mcore.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1])"


@pytest.mark.parametrize("auto", ["AutoConfig", "AutoTokenizer"])
def test_a_models_own_code_is_refused(tmp_path: Path, auto: str):
    folder, ran = tmp_path / "model", tmp_path / "ran"
    write_model(folder, build_tokenizer([]), seed=0)
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nfrom transformers import PretrainedConfig as Own\n"
    )
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"model_type": "their_own", "auto_map": {"AutoConfig": "own.Own"}} if auto == "AutoConfig" else {}
    tokenizer |= {"auto_map": {auto: ["own.Own", "own.Own"]}} if auto == "AutoTokenizer" else {}
    tokenizer.pop("tokenizer_class", None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    argv = [sys.executable, "-c", READ, str(folder)]
    done = subprocess.run(argv, cwd=ROOT, input="y\n" * 9, capture_output=True, text=True, timeout=300, check=False)
    assert not ran.exists(), done.stderr[-1000:]
    assert "[y/N]" not in done.stdout + done.stderr
