"""Platforms in fresh processes: missing plugins, stale metadata, Ray."""

import os
import subprocess
import sys


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process, without the environment of an activated platform."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RETOOL_PLATFORM", "VERL_PLATFORM", "PYTHONPATH")}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=clean | env)


def test_a_missing_plugin_is_an_error_and_not_a_fall_back():
    code = "import verl\nfrom retool_mcore.verl.plugin import assert_loaded\nassert_loaded()"
    done = run(code, VERL_PLATFORM="nvidia")
    assert "RETOOL_PLATFORM is not set" in done.stderr


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


def test_ray_is_not_imported_before_the_platform_is_activated():
    """Ray reads its variables when it is imported, and verl imports it in child processes."""
    code = "import sys, retool_mcore.train.rl; print('ray' in sys.modules)"
    assert run(code, RETOOL_PLATFORM="cpu", VERL_PLATFORM="cpu").stdout == "False\n"
