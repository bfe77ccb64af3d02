"""Which stage of verl's set-up a starting run is in, read off what verl's trainer logs."""

import logging
from collections.abc import Mapping
from pathlib import Path

from retool_mcore.run.start import begin

TRAINER_LOG = "verl.trainer.ppo.v1.trainer_base"
BEGINS = {  # the beginning of what verl logs when a part is ready -> the stage that begins then
    "create worker group": "model",
    "actor and ref model engine initialized": "reward",
    "reward loop manager initialized": "engines",
    "checkpoint engine manager initialized": "checkpoint",
    "all initialize finished": "agent_loops",
}
# Engines with devices of their own are started when all else is there; ReToolAsyncTrainer says when
# they have been.
BEGINS_DETACHED = BEGINS | {"reward loop manager initialized": "checkpoint", "all initialize finished": "engines"}


class StageLog(logging.Handler):
    """Writes the stages of ``verl.trainer``'s set-up, which is one method without hooks."""

    def __init__(self, run_dir: Path, begins: Mapping[str, str]) -> None:
        super().__init__(logging.INFO)
        self._run_dir, self._begins = run_dir, begins
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        for words, stage in self._begins.items():
            if said.startswith(words) and stage not in self._seen:
                self._seen.add(stage)
                begin(self._run_dir, stage)


def follow(run_dir: Path, *, detached_engines: bool) -> None:
    """Write the stages of this process's trainer from here on; see ``StageLog``."""
    begins = BEGINS_DETACHED if detached_engines else BEGINS
    logging.getLogger(TRAINER_LOG).addHandler(StageLog(run_dir, begins))
