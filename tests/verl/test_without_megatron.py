"""The driver of an RL run and SGLang do without Megatron, a third of the driver's imports."""

import json
import subprocess
import sys

from tests.scenario import ROOT

DRIVER = """
import json, sys
from retool_mcore.run.network import keep_to_loopback
keep_to_loopback()
from retool_mcore.platforms import get_platform
get_platform("cpu").activate()
from retool_mcore.verl.without_megatron import leave_out
leave_out()
import retool_mcore.verl.runner
found = [sorted({"megatron.core", "transformer_engine", "retool_mcore.verl.trainer"} & sys.modules.keys())]
from retool_mcore.platforms.sglang_plugin import load
load()
import sglang.srt.model_executor.model_runner
found.append(sorted({"megatron.core", "sglang.srt.debug_utils.dumper"} & sys.modules.keys()))
from retool_mcore.verl.without_megatron import put_off
from verl.utils.import_utils import import_external_libs
library = "retool_mcore.platforms.cpu.engine"
with put_off(library):
    import_external_libs(library)  # as verl's model configuration does
found.append(sorted({"megatron.core", library} & sys.modules.keys()))
import_external_libs(library)
found.append(hasattr(sys.modules[library], "CpuMegatronEngine"))
from verl.workers.engine.megatron import MegatronEngine  # whoever asks for it gets it
print(json.dumps([*found, MegatronEngine.__name__]))
"""


def test_the_driver_imports_its_trainer_and_sglang_without_megatron():
    argv = [sys.executable, "-W", "error:.*engine is not available:UserWarning", "-c", DRIVER]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        ["retool_mcore.verl.trainer"],
        ["sglang.srt.debug_utils.dumper"],
        [],
        True,
        "MegatronEngine",
    ]
    assert "engine is not available" not in done.stderr
