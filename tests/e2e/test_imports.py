"""What an import of the package costs, and what the repository must not contain."""

import subprocess
import sys

from tests.unit.test_architecture import ROOT


def test_pure_rooms_import_in_a_moment_and_without_torch():
    code = (
        "import sys; import retool_mcore.config, retool_mcore.cli.main, retool_mcore.sandbox.base; "
        "heavy = {'torch', 'verl', 'ray', 'transformers', 'megatron'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_machine_leaks_into_the_repository():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    words = ["/" + "work/", "/" + "root/", "bash_" + "jobs"]
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".parquet", ".png"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not [word for word in words if word in text], name
