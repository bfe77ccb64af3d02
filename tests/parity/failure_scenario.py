"""Run by test_failure.py in its own process: the errors of a run that loses an actor of Ray.

Prints one JSON object in its last line: the kind of loss -> the error's class and text.
"""

import json
import os
import sys
from pathlib import Path

import hydra
import ray
from ray.exceptions import RayError

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.verl.failure import ProcessWatch, error_for_user
from tests.e2e.commands import wait_until


@ray.remote(num_cpus=0)
class Worker:
    def die(self) -> None:
        os.kill(os.getpid(), 9)

    def fail(self) -> None:
        raise KeyError("no such thing")

    def instantiate(self) -> None:
        hydra.utils.instantiate({"_target_": "pathlib.Path.read_text", "_args_": [Path("absent")]})

    def refuse(self) -> None:
        raise ConfigError("train.steps = 0 is too few")

    def ask(self, other: ray.actor.ActorHandle) -> None:
        ray.get(other.die.remote())


def described(error: object) -> list[str]:
    return [type(error).__name__, str(error)]


def main(root: Path) -> dict[str, list[str]]:
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"run.root={root}", "run.name=lost"])
    log = config.run.dir / "logs" / "rl.log"
    log.parent.mkdir(parents=True)
    log.write_text("nothing of a worker's\n", encoding="utf-8")
    killed = Worker.remote()
    ray.kill(killed)  # as the run itself does at its end
    errors = {"before": described(ProcessWatch(config).error())}
    for loss in ("die", "fail", "instantiate", "refuse", "ask"):
        worker = Worker.remote()
        try:
            ray.get(worker.ask.remote(Worker.remote()) if loss == "ask" else getattr(worker, loss).remote())
        except RayError as error:
            errors[loss] = described(error_for_user(error, config))
        if loss == "die":
            wait_until(lambda: ProcessWatch(config).error() is not None, "Ray lists the dead actor", 60)
            errors["listed"] = described(ProcessWatch(config).error())
    return errors


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    found = main(Path(sys.argv[1]))
    ray.shutdown()  # which ends what Ray prints of dead workers
    print(json.dumps(found))
