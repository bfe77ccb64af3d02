"""Platforms in fresh processes: activation, missing plugins, Ray, stores, `make install`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retool_mcore.platforms import get_platform
from tests.unit.platforms.test_network import EVERY_INTERFACE

cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
LOAD_A_MODEL = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
shape = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1)
AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape)).save_pretrained(sys.argv[1])
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process, without the environment of an activated platform."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RETOOL_PLATFORM", "VERL_PLATFORM", "PYTHONPATH")}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=clean | env)


def test_choosing_a_platform_imports_no_engine():
    code = (
        "import sys; from retool_mcore.platforms import get_platform; get_platform('cpu'); get_platform('cuda');"
        "print([m for m in ('torch', 'verl', 'megatron', 'ray', 'sglang') if m in sys.modules])"
    )
    assert run(code).stdout.strip() == "[]"


@cpu_only
def test_a_child_process_inherits_the_platform_through_the_environment():
    done = run("import verl.utils.device as d; print(d.get_device_name())", **get_platform("cpu").process_env())
    assert done.stdout.strip() == "cpu", done.stderr


def test_verl_is_left_alone_outside_a_run():
    code = "import verl; from verl.plugin.platform import PlatformRegistry as r; print('cpu' in r.registered_names())"
    done = run(code, VERL_PLATFORM="nvidia")
    assert done.stdout.strip() == "False", done.stderr


def test_a_missing_plugin_is_an_error_and_not_a_fall_back():
    code = "import verl\nfrom retool_mcore.verl.plugin import assert_loaded\nassert_loaded()"
    done = run(code, VERL_PLATFORM="nvidia")
    assert "RETOOL_PLATFORM is not set" in done.stderr


@cpu_only
def test_verl_on_another_platform_than_the_run_is_an_error():
    env = get_platform("cpu").process_env() | {"VERL_PLATFORM": "nvidia", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    code = (
        "import os, verl.plugin.platform as p; p.get_platform()\n"
        "from retool_mcore.verl.plugin import assert_loaded\nassert_loaded()"
    )
    assert 'verl runs on platform "nvidia", but the run needs "cpu"' in run(code, **env).stderr


@cpu_only
def test_stale_installed_metadata_is_refused(tmp_path):
    """A folder on the path with an egg-info from before a plugin existed hides the installed
    metadata.
    """
    egg_info = tmp_path / "retool_mcore.egg-info"
    egg_info.mkdir()
    (egg_info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: retool_mcore\nVersion: 0.0.1\n")
    (egg_info / "entry_points.txt").write_text("[verl.plugins]\nretool_mcore = retool_mcore.verl.plugin\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from retool_mcore.platforms import get_platform; get_platform('cpu').activate()"
    )
    assert "has no plugin of group sglang.srt.plugins" in run(code).stderr


@pytest.mark.long
@cpu_only
@pytest.mark.parametrize(("hidden", "seen"), [("", "-1"), ("7", "7")])
def test_ray_has_logical_gpus_where_all_devices_are_hidden(hidden: str, seen: str):
    """check_machine suggests this value, and Ray rejects it unchanged."""
    script = (
        "from retool_mcore.platforms import get_platform; get_platform('cpu').activate()\n"
        "import os, ray; ray.init(num_gpus=1, num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        "print(ray.get(ray.remote(num_gpus=1)(lambda: os.environ['CUDA_VISIBLE_DEVICES']).remote()))"
    )
    done = run(script, CUDA_VISIBLE_DEVICES=hidden)
    assert done.stdout.split()[-1:] == [seen], done.stderr[-2000:]


def test_ray_is_not_imported_before_the_platform_is_activated():
    """Ray reads its variables when it is imported, and verl imports it in child processes."""
    code = "import sys, retool_mcore.train.rl; print('ray' in sys.modules)"
    assert run(code, RETOOL_PLATFORM="cpu", VERL_PLATFORM="cpu").stdout == "False\n"


def test_without_the_patch_a_store_listens_on_every_interface():
    code = "from tests.unit.platforms.doors import where_the_store_listens as f; print(f(None))"
    assert run(code).stdout.strip() in EVERY_INTERFACE


@cpu_only
def test_a_model_loads_without_our_environment_after_make_install(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD_A_MODEL, tmp_path],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout.split() == ["Qwen2ForCausalLM"], done.stderr[-2000:]
