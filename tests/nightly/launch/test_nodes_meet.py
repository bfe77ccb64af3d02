"""SFT's nodes by the real torchrun and gloo on this machine: a lost rank, a missing node."""

import pytest

from retool_mcore.rollout.server import free_port
from tests.nightly.launch.scripts import SFT, Scripts

RANKS = 'exec "$REAL_PYTHON" ${words//launch\\/sft_mcore.py/tests/nightly/launch/two_ranks.py}'
pytestmark = [pytest.mark.timeout(300)]


@pytest.mark.parametrize("lost", [0, 1])
def test_both_nodes_join_again_after_a_lost_rank(scripts: Scripts, lost: int):
    scripts.replace("run", RANKS)
    env = {"FAKE_NODES": "2", "TORCH_PORT": str(free_port()), "HEAD_WAIT_S": "60"}
    env |= {"RESTARTS": "1", "RESTART_WAIT_S": "1"}
    nodes = [scripts.start(SFT, f"log{rank}", NODE_RANK=str(rank), **env) for rank in (0, 1)]
    met = scripts.folder / "met"
    scripts.until(lambda: met.exists() and len(met.read_text().split()) == 2, "both meet", 90)
    (scripts.folder / f"kill{lost}").touch()
    scripts.until(lambda: len(met.read_text().split()) == 4, "both meet again", 90)
    (scripts.folder / "end").touch()
    assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    other = scripts.output(f"log{1 - lost}")
    assert "another rank has ended" in other
    assert "the run failed (exit code 3); restart 1 of RESTARTS = 1" in other
