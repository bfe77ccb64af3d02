"""Export a run's checkpoint as a model directory that transformers and SGLang can load.

The bridge writes Hugging Face weights into every checkpoint. An export verifies their checksums and
copies them to the target folder. It needs no process group and does not load the model into memory.
Checkpoints of a LoRA run contain only adapters; the export merges these into the base model's
weights, file by file. When a run finishes, it exports its model and prints a summary.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.config.shared import CONFIG_FILE, END_OF_TURN, FORMAT_FILE
from retool_mcore.errors import CheckpointError
from retool_mcore.model.adapter import CONFIG, is_adapter, merge
from retool_mcore.model.files import dtype_of_weights, read_config
from retool_mcore.process import exit_on_sigterm
from retool_mcore.run.checkpoint import (
    BEST_FILE,
    STATE_FILE,
    best_so_far,
    complete_checkpoints,
    find_damage,
    read_best,
    read_state,
    step_folders,
)
from retool_mcore.run.folder import explain_full_disk, lock_run
from retool_mcore.run.metrics import read_metrics
from retool_mcore.run.status import print_commands, print_text

_WEIGHTS = Path("actor", "model", "huggingface")


def export(run_dir: Path, to: Path, which: str = "newest", *, adapter: bool = False) -> Path:
    """Copy a complete checkpoint's weights, configuration and tokenizer to ``to``.

    For a LoRA run, export the merged model, or only the adapters with ``adapter``. ``which``: see
    ``find_weights``. The export is atomic. Raises CheckpointError when there is no complete
    checkpoint, when it is damaged, or when ``to`` contains something other than a model.
    """
    source = find_weights(run_dir, which)
    if adapter and not is_adapter(source):
        raise CheckpointError(f"{run_dir} trained all weights (lora.rank = 0), so it has no adapter to export.")
    _require_intact(source.parents[len(_WEIGHTS.parts) - 1])
    if not is_adapter(source):
        read_config(str(source))
    is_model = any((to / name).is_file() for name in ("config.json", CONFIG))
    if to.exists() and not is_model and any(to.iterdir()):
        raise CheckpointError(f"{to} is not empty and is not a model directory. It was not changed. Name another one.")
    hidden = to.with_name(f".{to.name}.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    with explain_full_disk(to, "Nothing was exported. Free some space, or name another folder with --to."):
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            if adapter:  # with config.json, transformers would treat it as a full model
                shutil.copytree(source, hidden, ignore=shutil.ignore_patterns("config.json", "generation_config.json"))
            elif is_adapter(source):
                merge(source, hidden)
            else:
                shutil.copytree(source, hidden)
            if not adapter:
                _write_dtype(hidden)
            if (run_dir / FORMAT_FILE).is_file():
                shutil.copy(run_dir / FORMAT_FILE, hidden / FORMAT_FILE)
                _add_eos(hidden)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    shutil.rmtree(to, ignore_errors=True)
    os.replace(hidden, to)
    return to


def _require_intact(folder: Path) -> None:
    """Raise CheckpointError when the weights of a checkpoint fail their checksums."""
    if problem := find_damage(folder, read_state(folder).files, f"{_WEIGHTS}/"):
        others = sorted(saved.step for saved in complete_checkpoints(folder.parent) if saved.path != folder)
        name = f"Name another one: --checkpoint {others[-1]}." if others else "It is the only complete one."
        raise CheckpointError(f"{folder} is damaged: {problem}. {name}")


def _write_dtype(folder: Path) -> None:
    """Write the dtype of the exported weights into config.json.

    The bridge copies config.json from the initial model, whose weights may have another dtype.
    """
    path = folder / "config.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for key in {"dtype", "torch_dtype"} & values.keys() or {"dtype"}:
        values[key] = dtype_of_weights(folder)
    _write(path, values)


def _add_eos(folder: Path) -> None:
    """Add the run's end-of-turn token to the model's eos tokens, if it is missing there.

    Otherwise, a base model trained with another chat template would never stop generating.
    """
    end = json.loads((folder / FORMAT_FILE).read_text(encoding="utf-8")).get(END_OF_TURN)
    config, generation = _values(folder / "config.json"), _values(folder / "generation_config.json")
    if end is None or config is None:
        return
    known = [config.get("eos_token_id"), *_listed((generation or {}).get("eos_token_id"))]
    if end["id"] in known:
        return
    ends = list(dict.fromkeys(token_id for token_id in (end["id"], *known) if token_id is not None))
    _write(folder / "config.json", {**config, "eos_token_id": end["id"]})
    _write(folder / "generation_config.json", {**(generation or {}), "eos_token_id": ends})
    if (tokenizer := _values(folder / "tokenizer_config.json")) is not None:
        _write(folder / "tokenizer_config.json", {**tokenizer, "eos_token": end["token"]})


def _values(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _listed(ids: Any) -> list[int]:
    return cast("list[int]", ids) if isinstance(ids, list) else [ids]


def export_at_end(config: RunConfig) -> None:
    """Export a finished run to ``<run>/export``, if ``checkpoint.export`` is set.

    Exports the best checkpoint with best.metric, otherwise the last.
    """
    if config.checkpoint.export:
        export(config.run.dir, config.run.dir / "export", "best" if config.best.metric else "newest")


def finish(config: RunConfig) -> None:
    """Export a finished run, and print why it ended early, its outputs and the next commands.

    A SIGTERM during the export removes the partial export.
    """
    exit_on_sigterm()
    with lock_run(config.run.dir):
        export_at_end(config)
    console = Console(stderr=True)
    if (best := best_so_far(config, config.num_steps)) and best.stopped_early:
        print_text(console, f"note: {best.summary()}")
    print_commands(console, closing_lines(config))


def closing_lines(config: RunConfig) -> Iterator[str]:
    """Yield the lines that a finished run prints: outputs, last validation, suggested commands."""
    run = config.run.dir.absolute()  # so that the commands work in any directory
    best = read_best(run) if config.best.metric else None
    which = f": {best.summary()}" if best is not None else ""
    saved = complete_checkpoints(run / "checkpoints")
    export_dir = run / "export"
    if config.checkpoint.export and export_dir.is_dir():
        yield f"exported {export_dir}{which or f', of step {saved[-1].step}' if saved else ''}"
    elif saved:
        yield f"saved {saved[-1].path}{which}"
    metrics = run / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.is_file() else []
    for row in [row for row in rows if "val/accuracy" in row or "val_loss" in row][-1:]:
        if "val_loss" in row:
            value = f"val_loss {row['val_loss']:.4f}"
        else:
            low, high = row.get("val/accuracy/low"), row.get("val/accuracy/high")
            interval = "" if low is None or high is None else f" (95 %: {low:.3f} to {high:.3f})"
            value = f"accuracy {row['val/accuracy']:.3f}{interval}"
        yield f"validation at step {int(row['step'])}: {value}"
    folder, report, view, model, source, scores = (
        shlex.quote(str(path))
        for path in (run, run / "report.html", run / "view.html", export_dir, run / CONFIG_FILE, run / "eval")
    )
    yield f"next: retool report {folder} --out {report}"
    if isinstance(config, RlConfig) and config.rollout.record_groups:
        yield f"      retool view {folder} --out {view}"
    if config.checkpoint.export and isinstance(config, RlConfig):
        yield f"      retool eval {source} --model {model} --out {scores}"
    elif config.checkpoint.export:
        yield f"      retool rl CONFIG model.path={model}"


def find_weights(run_dir: Path, which: str = "newest") -> Path:
    """Return the Hugging Face folder of a run's checkpoint, or of a given checkpoint folder.

    ``which``: "newest", "best" (by best.metric), or a step number. Raises CheckpointError.
    """
    checkpoints = run_dir / "checkpoints"
    saved_steps = complete_checkpoints(checkpoints)
    newest = [path for path in reversed(step_folders(checkpoints).values()) if (path / STATE_FILE).is_file()][:1]
    if newest and which == "newest":
        read_state(newest[0])  # raises if it is damaged: do not silently fall back to an older model
    candidates = [run_dir, *(saved.path for saved in reversed(saved_steps))]
    if which != "newest":
        step, complete = _step_of(run_dir, which), {saved.step: saved.path for saved in saved_steps}
        if step not in complete:
            raise CheckpointError(
                f"{checkpoints} has no complete checkpoint of step {step}. There are: "
                f"{', '.join(map(str, complete)) or 'none'}."
            )
        candidates = [complete[step]]
    for folder in candidates:
        if (folder / STATE_FILE).is_file() and (folder / _WEIGHTS / "config.json").is_file():
            return folder / _WEIGHTS
    what = f"looked for {_WEIGHTS} under {checkpoints}" if run_dir.is_dir() else "there is no such folder"
    raise CheckpointError(f"{run_dir} has no complete checkpoint: {what}.")


def _step_of(run_dir: Path, which: str) -> int:
    if which.isdecimal():
        return int(which)
    if which != "best":
        raise CheckpointError(f'{which!r} is not a checkpoint. Choose "newest", "best" or the number of a step.')
    best = read_best(run_dir)
    step = best.step() if best else None
    if step is None:
        raise CheckpointError(
            f"{run_dir} has no best checkpoint: a run writes {run_dir / BEST_FILE} after a validation, if best.metric "
            'is set. Choose "newest" or a step.'
        )
    return step
