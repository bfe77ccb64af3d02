"""Activation of a platform in a process that imports nothing else."""

import pytest

from retool_mcore.platforms import get_platform
from tests.unit.platforms.test_platform import cpu_only, run


def test_choosing_a_platform_imports_no_engine():
    code = (
        "import sys; from retool_mcore.platforms import get_platform; get_platform('cpu'); get_platform('cuda');"
        "print([m for m in ('torch', 'verl', 'megatron', 'ray', 'sglang') if m in sys.modules])"
    )
    assert run(code).stdout.strip() == "[]"


@cpu_only
def test_verl_runs_on_our_platform_after_activation():
    code = (
        "from retool_mcore.platforms import get_platform; cpu = get_platform('cpu'); cpu.activate(); cpu.activate()\n"
        "from retool_mcore.verl.plugin import assert_loaded; assert_loaded()\n"
        "from verl.utils import device; print(device.get_device_name(), device.get_nccl_backend())"
    )
    done = run(code)
    assert done.stdout.strip() == "cpu gloo", done.stderr


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
    assert 'verl runs on platform "nvidia" and the run asks for "cpu"' in run(code, **env).stderr


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
    assert "names no plugin of group sglang.srt.plugins" in run(code).stderr


@pytest.mark.long
@cpu_only
@pytest.mark.parametrize(("given", "seen"), [("", "-1"), ("7", "7")])
def test_ray_has_logical_gpus_where_all_devices_are_hidden(given: str, seen: str):
    """What check_machine tells to set where torch finds a device; Ray refuses it as it is."""
    script = (
        "from retool_mcore.platforms import get_platform; get_platform('cpu').activate()\n"
        "import os, ray; ray.init(num_gpus=1, num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        "print(ray.get(ray.remote(num_gpus=1)(lambda: os.environ['CUDA_VISIBLE_DEVICES']).remote()))"
    )
    done = run(script, CUDA_VISIBLE_DEVICES=given)
    assert done.stdout.split()[-1:] == [seen], done.stderr[-2000:]
