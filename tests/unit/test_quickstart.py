"""The quickstart's stages: skipped when done, timed over all tries, and honest about a failure."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from retool_mcore import quickstart
from retool_mcore.quickstart import StageFailed, Stages, run

QUIET = Console(quiet=True)
RECORDED = Path(__file__).parents[1] / "report" / "quickstart"


def test_a_stage_is_done_once_it_has_ended_well_and_takes_the_time_of_all_tries(tmp_path: Path, monkeypatch):
    clock = iter([10.0, 15.0, 100.0, 102.0, 200.0, 201.0])
    monkeypatch.setattr(quickstart, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(KeyboardInterrupt), Stages(tmp_path, QUIET)._timed("sft"):
        raise KeyboardInterrupt
    assert json.loads((tmp_path / "stages.json").read_text()) == {"sft": {"done": False, "seconds": 5.0}}
    for name in ("sft", "tool_rl"):
        with (again := Stages(tmp_path, QUIET))._timed(name):
            pass
    assert again.seconds == {"sft": 7.0, "tool_rl": 1.0}
    again.run("sft", "supervised fine-tuning", "-c", "a process would start")


RL = (
    "launch/rl.py configs/rl_tiny_cpu.toml run.root={0} run.seed=7 run.name={1} model.path={0}/sft/export "
    'rollout.tools={2} data.train_file={0}/task/rl_train.parquet validation.files=["{0}/task/rl_val.parquet"]'
)


def test_the_stages_train_and_evaluate_one_anothers_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    argvs: dict[str, str] = {}
    monkeypatch.setattr(Stages, "run", lambda self, name, what, *argv, watch=None: argvs.update({name: " ".join(argv)}))
    stages, at = Stages(tmp_path, QUIET), str(tmp_path)
    shutil.copytree(RECORDED / "evaluation", tmp_path / "evaluation")
    quickstart._train(stages, tmp_path, 7)
    quickstart._evaluate(stages, tmp_path, 7)
    models = " ".join(f"--model {name}={at}/{name}/export" for name in ("sft", "tool_rl", "text_rl"))
    assert argvs == {
        "task": f"-m retool_mcore data task {at}/task --seed 7",
        "sft": f"-m retool_mcore sft configs/sft_tiny_cpu.toml run.root={at} run.seed=7 run.name=sft "
        f"model.path={at}/task/model data.train_file={at}/task/sft_train.parquet "
        f'validation.files=["{at}/task/sft_val.parquet"]',
        "tool_rl": RL.format(at, "tool_rl", '["code_interpreter"]'),
        "text_rl": RL.format(at, "text_rl", "[]"),
        "evaluate": f"-m retool_mcore eval configs/rl_tiny_cpu.toml run.root={at} run.seed=7 run.name=evaluation "
        f"model.path={at}/sft/export {models} --data {at}/task/eval.parquet --out {at}/evaluation --tool both "
        "--n 8 --limit 64",
    }


def test_another_seed_in_the_same_folder_is_refused(tmp_path: Path):
    (tmp_path / "seed").write_text("7")
    with pytest.raises(StageFailed, match="has a quickstart with seed 7, not 0"):
        run(tmp_path, 0)


def test_a_finished_quickstart_ends_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """All stages were done before, so nothing is trained; the folder is a recorded quickstart's."""
    root = tmp_path / "quickstart"
    shutil.copytree(RECORDED, root)
    for name, accuracy in (("tool_rl_text", 0.125), ("text_rl_text", 0.25)):
        path = root / "evaluation" / name / "report.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"accuracy": accuracy}))
    run(root, 0)
    shown = capsys.readouterr().out
    assert f"report       {root}/report.html" in shown.replace("\n", "")
    cells = [line.replace("│", "").split() for line in shown.splitlines() if line.startswith("│")]
    assert [each[-2:] for each in cells] == [["0.322", "0.000"], ["0.918", "0.125"], ["0.322", "0.250"]]
    summary = json.loads((root / "summary.json").read_text(encoding="utf-8"))
    assert (summary["seed"], summary["samples_per_problem"], summary["eval_problems"]) == (0, 8, 64)
    assert [summary["seconds_total"], summary["seconds"]["sft"], summary["accuracy"]["sft"]] == [674.5, 72.9, 0.322266]
    text = (root / "report.html").read_text(encoding="utf-8")
    assert "sft, tool_rl and text_rl" in text and "0.322 → 0.918" in text
