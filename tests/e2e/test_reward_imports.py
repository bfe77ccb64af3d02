"""The reward works without torch."""

import subprocess
import sys


def test_reward_needs_no_torch():
    code = "import sys, retool_mcore.reward.score, retool_mcore.reward.checker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
