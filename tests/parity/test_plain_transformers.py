"""Where `make install` has been, plain transformers loads models outside any run."""

import subprocess
import sys

import pytest
import torch

LOAD = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
shape = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1)
folder = sys.argv[2]
AutoModelForCausalLM.from_config(AutoConfig.for_model(sys.argv[1], **shape)).save_pretrained(folder)
print(type(AutoModelForCausalLM.from_pretrained(folder)).__name__)
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
@pytest.mark.parametrize(("kind", "name"), [("qwen2", "Qwen2ForCausalLM"), ("llama", "LlamaForCausalLM")])
def test_a_model_loads_without_our_environment(tmp_path, kind: str, name: str):
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, kind, tmp_path],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [name]
