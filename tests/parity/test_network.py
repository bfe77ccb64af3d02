"""Ray is imported only after the platform has set its environment."""

import os
import subprocess
import sys

from tests.unit.platforms.test_network import nothing_set  # noqa: F401  a fixture


def test_ray_is_not_imported_before_even_in_a_child_of_a_run():
    """Ray reads its variables when imported, and a run's platform loads verl, which imports it."""
    code = "import sys, retool_mcore.train.rl; print('ray' in sys.modules)"
    env = os.environ | {"RETOOL_PLATFORM": "cpu", "VERL_PLATFORM": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
