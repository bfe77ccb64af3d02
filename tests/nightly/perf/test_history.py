"""`perf/history.py` prints records with their origin."""

import subprocess
import sys

from tests.unit.perf.test_pages import PERF


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", PERF / "history.py", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_record_is_printed_with_its_origin_and_its_figures():
    done = run("--topic", "reward", "--since", "2026-11-23", "--until", "2026-11-23", "math-verify")
    assert done.returncode == 0, done.stderr
    assert "2026-11-23, 46eb8e7, 2f3386f, CPU, 2 cores, 24 GiB" in done.stdout
    assert "| math-verify 0.9.0, its defaults | 41.2, 46.2, 35.0 % | 3.8, 0.0, 3.8 % | 9 to 11 |" in done.stdout
    assert done.stdout.count("\n## ") == 0  # one record: others of these days or this topic are left out


def test_a_topic_without_records_is_an_error_that_lists_the_topics():
    done = run("--topic", "sandbx")
    assert done.returncode == 2
    assert done.stderr.startswith("error: Unknown --topic sandbx. Choose one of: ") and "sandbox" in done.stderr
