"""Warnings about a run, derived from its files alone."""

from retool_mcore.report.numbers import duration
from retool_mcore.report.record import RunRecord, State, stage_of_start, step_seconds
from retool_mcore.run.alarms import alarms
from retool_mcore.run.start import STAGE_TEXTS

# A run counts as stalled if it writes no row for STALLED_S and for STALLED_STEPS times its usual
# time per step. This leaves time for validations and checkpoints.
STALLED_S = 120.0
STALLED_STEPS = 5.0
START_STAGE_S = 900.0  # longest normal start stage; large models load within it


def warnings_of(run: RunRecord, state: State, now_s: float) -> list[str]:
    """Return one sentence per current or imminent problem. ``now_s``: Unix seconds."""
    sentences = [_stalled(run, now_s) if state.name == "running" else "", *alarms(run.rows, run.settings).values()]
    if state.name == "killed":
        sentences.insert(0, f"the run is not running; it stopped {state.stage}")
    return [warning for warning in sentences if warning]


def _stalled(run: RunRecord, now_s: float) -> str:
    log = run.path / "logs"
    starting = stage_of_start(run)
    if starting:
        waited_s = now_s - run.begun[-1][1]
        stage = STAGE_TEXTS.get(starting, starting)
        late = waited_s > START_STAGE_S
        return f"the start has spent {duration(waited_s)} on one stage: {stage}. Look into {log}" if late else ""
    usual_s = step_seconds(run.rows)
    if usual_s is None or not run.rows:
        return ""
    waited_s = now_s - run.rows[-1].get("unix_s", now_s)
    if waited_s <= max(STALLED_S, STALLED_STEPS * usual_s):
        return ""
    what = "an engine, the interpreter or a node may be stuck" if run.kind == "rl" else "a rank may be stuck"
    return f"no step for {duration(waited_s)}, but a step usually takes {duration(usual_s)}: {what}. Look into {log}"
