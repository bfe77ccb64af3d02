"""What each shipped configuration changes in verl's settings is what was recorded, and every key is
one of verl's.

A change of ours shows as the keys it changes, one of verl's defaults as another fingerprint. Where
it is meant: python -m tests.golden.record, and the diff is read.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="platform cpu refuses an accelerator"),
]

HERE = Path(__file__).parents[1] / "golden"
CONFIGS = HERE.parents[1] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    command = [sys.executable, "-W", "ignore", "-m", "tests.golden.record", str(folder), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_shipped_configuration_is_recorded():
    assert len(NAMES) == 18
    assert sorted(path.stem for path in HERE.glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_resolves_to_what_was_recorded(name: str, trees: Path):
    recorded, now = read(HERE / f"{name}.yaml"), read(trees / f"{name}.yaml")
    default = "verl's default"
    changed = [
        f"{key}: {recorded.get(key, default)!r} -> {now.get(key, default)!r}"
        for key in sorted({*recorded, *now})
        if (key in recorded, recorded.get(key)) != (key in now, now.get(key))
    ]
    assert not changed, "\n".join(["python -m tests.golden.record, if this is meant:", *changed])


def test_verls_defaults_are_those_that_the_records_differ_from(trees: Path):
    """Or the records say less than the whole tree."""
    recorded, now = (json.loads((folder / "verl_defaults.json").read_text()) for folder in (HERE, trees))
    assert now == recorded, "verl's own settings changed: read its changes, then python -m tests.golden.record"


# verl's table of overrides -> the file of Megatron-core whose class takes them.
MEGATRON = {
    "override_transformer_config": ("transformer/transformer_config.py", "model_parallel_config.py"),
    "override_ddp_config": ("distributed/distributed_data_parallel_config.py",),
    "override_optimizer_config": ("optimizer/optimizer_config.py",),
}
# A field of a verl dataclass that its YAML leaves out -> the file with the class that stands in it.
LEFT_OUT = {
    "policy_loss.rollout_correction": "trainer/config/algorithm.py",
    "rollout.agent": "workers/config/rollout.py",
}
# Tables that verl leaves open: what may stand in them is another package's to say.
OPEN_TABLES = {
    **dict.fromkeys(MEGATRON, "Megatron-core's, and MindSpeed's options"),
    **dict.fromkeys(LEFT_OUT, "verl's own dataclass"),
    "engine_kwargs.vllm": "vLLM's engine arguments",
    "engine_kwargs.sglang": "SGLang's server arguments",
    "sampler_kwargs": "our own sampler",
    "reward_kwargs": "our own reward",
    "ray_kwargs.ray_init.runtime_env": "Ray's, and merged by verl",
}
RAY = {f"ray_kwargs.ray_init.{name}" for name in ("num_gpus", "include_dashboard", "object_store_memory")}
BASE = "actor_rollout_ref.model.lora.base_precision"  # a table without a class in verl; verl/lora.py reads it
OURS = {"trainer.retool_config", BASE} | RAY  # verl hands all of ray_init on to ray.init
# In mindspeed of core_r0.16.0 at e4772499f7eb9fa9a68919dd1eaddef00e915b2d.
MINDSPEED_OPTIONS = {"use_flash_attn", "use_fused_rmsnorm", "use_fused_swiglu"}


@pytest.mark.parametrize("name", NAMES)
def test_every_verl_key_exists_in_verl(name: str, trees: Path):
    """A key that verl's tree or dataclass does not have may only stand in a table that verl leaves
    open.
    """
    megatron = importlib.util.find_spec("megatron.core")  # read, not imported
    assert megatron is not None and megatron.origin is not None
    core = Path(megatron.origin).parent
    fields = {
        table: "".join((core / file).read_text(encoding="utf-8") for file in files) for table, files in MEGATRON.items()
    }
    verl = importlib.util.find_spec("verl")
    assert verl is not None and verl.origin is not None
    for table, file in LEFT_OUT.items():
        fields[table] = "\n    _target_:" + (Path(verl.origin).parent / file).read_text(encoding="utf-8")
    added = json.loads((trees / "added.json").read_text(encoding="utf-8"))[name]
    assert added
    for key in added:
        assert key in OURS or any(f"{table}." in key or key.endswith(table) for table in OPEN_TABLES), key
        for table, known in fields.items():
            if option := key.partition(f"{table}.")[2]:
                assert (option in MINDSPEED_OPTIONS and "_a2x" in name) or f"\n    {option}:" in known, key
