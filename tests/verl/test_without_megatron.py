"""The processes of an RL run that have no model do without Megatron, a third of their imports."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retool_mcore.platforms.absent import absent
from tests.scenario import ROOT

DRIVER = """
import json, sys
from types import SimpleNamespace
from retool_mcore.run.network import keep_to_loopback
keep_to_loopback()
from retool_mcore.platforms import get_platform
get_platform("cpu").activate()
from retool_mcore.verl.without_megatron import leave_out
leave_out()
import retool_mcore.verl.runner
from verl.workers.rollout.replica import RolloutReplicaRegistry
from retool_mcore.verl import rl_metrics
rl_metrics.measure_sglang()
found = [RolloutReplicaRegistry.get("sglang").__name__]
found.append(sorted({"megatron.core", "transformer_engine", "retool_mcore.verl.trainer"} & sys.modules.keys()))
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
        "MeasuredReplica",
        ["retool_mcore.verl.trainer"],
        ["sglang.srt.debug_utils.dumper"],
        [],
        True,
        "MegatronEngine",
    ]
    assert "engine is not available" not in done.stderr


WORKER = """
import importlib, sys
from retool_mcore.run.network import keep_to_loopback
keep_to_loopback()
from retool_mcore.platforms import get_platform
get_platform("cpu").activate()
importlib.import_module(sys.argv[1])
print(sorted({"megatron.core", "sglang.srt.model_executor.model_runner"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("retool_mcore.verl.sglang_replica", ["sglang.srt.model_executor.model_runner"]),
        ("retool_mcore.verl.loop_workers", []),
        ("retool_mcore.verl.router", []),
    ],
)
def test_what_ray_imports_into_the_process_of_a_server_or_an_agent_loop_leaves_megatron_out(
    module: str, found: list[str]
):
    """The class of Ray's actor is imported by its name, before anything of ours is called."""
    argv = [sys.executable, "-c", WORKER, module]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == str(found)


def test_a_library_is_absent_for_one_thread_and_one_block(tmp_path, monkeypatch: pytest.MonkeyPatch):
    for name in ("absent_one", "absent_two", "absent_three"):
        (tmp_path / f"{name}.py").write_text("import threading\nthread = threading.get_ident()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import absent_one  # pyright: ignore[reportMissingImports]

    def import_two() -> None:
        __import__("absent_two")

    with absent("absent_one", "absent_two", "absent_three"):
        assert __import__("absent_one") is absent_one
        with pytest.raises(ModuleNotFoundError, match="absent_three"):
            __import__("absent_three")
        other = threading.Thread(target=import_two)
        other.start()
        other.join()
        assert sys.modules["absent_two"].thread == other.ident
    assert __import__("absent_three").thread == threading.get_ident()


@pytest.mark.usefixtures("verl_on_cpu")
@pytest.mark.parametrize("kind", ["server", "agent loop"])
def test_a_server_and_an_agent_loop_do_not_import_what_registers_engines(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In their constructors, where verl's model configuration would."""
    from verl.utils.import_utils import import_external_libs

    from retool_mcore.verl import loop_workers, sglang_server

    library = f"registers_for_{kind[0]}"
    (tmp_path / f"{library}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    given = []

    def construct(_: Any, config: Any, model: Any, *others: Any, **named: Any) -> None:
        given.append((config, model, *others, named))
        import_external_libs(library)

    model = SimpleNamespace(external_lib=library)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(model=model))
    if kind == "server":
        monkeypatch.setattr(sglang_server.SGLangHttpServer, "__init__", construct)
        sglang_server.MeasuredServer(config=config, model_config=model, replica_rank=3)
        assert given == [(config, model, {"replica_rank": 3})]
    else:
        monkeypatch.setattr(loop_workers._Worker, "__init__", construct)
        loop_workers.LoopWorker().construct(config, "client", "teacher")
        assert given == [(config, "client", "teacher", {})]
    assert library not in sys.modules
    construct(None, config, model)
    assert library in sys.modules
