"""The guardian's view of the process tree."""

import os
import subprocess
import sys

from retool_mcore.sandbox.supervisor import guardian

TREE = """
import os, time
if os.fork() == 0:
    if os.fork() == 0: pass
os.write(1, b"u")
time.sleep(60)
"""


def test_both_ways_to_find_children_agree():
    process = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(3) == "uuu"
    (child,) = guardian.children_listed(process.pid)
    (grandchild,) = guardian.children_listed(child)
    assert guardian.children_scanned(process.pid) == [child]
    assert guardian.children_scanned(child) == [grandchild]
    assert guardian.descendants(process.pid) == [child, grandchild]
    for pid in (grandchild, child, process.pid):
        os.kill(pid, 9)
    process.wait()


def test_tasks_of_a_user_include_this_one():
    assert guardian.count_tasks(os.getuid()) >= 1
    assert guardian.count_tasks(3_999_999_999) == 0
