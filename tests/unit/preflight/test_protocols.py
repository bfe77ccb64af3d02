"""SFT refuses at its start what RL would refuse after it: rows in a form that the model does not
serve.
"""

import shutil
from pathlib import Path

import pytest

from retool_mcore.config import SftConfig, load_config
from retool_mcore.data.files import write_parquet
from retool_mcore.data.tasks import TaskSpec, make_task
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.errors import CheckpointError
from retool_mcore.preflight import inputs
from retool_mcore.preflight.protocols import check_protocols
from tests.plain_chatml import with_template
from tests.unit.preflight.test_preflight import ROOT, judged

SFT = ROOT / "configs" / "sft_tiny_cpu.toml"
INLINE = "<code>\n```python\nprint(2)\n```\n</code>\n<interpreter>\n2\n</interpreter>\n<answer>\n\\boxed{2}\n</answer>"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's task, its model again with tags in pieces, and with a plain template."""
    folder = tmp_path_factory.mktemp("task")
    make_task(folder, 0, TaskSpec(sft_train=32, sft_val=8, rl_train=32, rl_val=8, eval=8))
    shutil.copytree(folder / "model", folder / "pieces")
    text = (folder / "model" / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "pieces" / "tokenizer.json").write_text(text.replace("</tool_call>", "</toolcall>"), encoding="utf-8")
    shutil.copytree(folder / "model", folder / "plain")
    with_template(load_tokenizer(str(folder / "model"))).save_pretrained(folder / "plain")
    question = {"role": "user", "content": "How much is 1 + 1?"}
    for name, answer in (("inline", INLINE), ("words", "\\boxed{2}")):
        row = {"messages": [question, {"role": "assistant", "content": answer}], "tools": None}
        write_parquet(folder / f"{name}.parquet", [row])
    return folder


def settings(task: Path, model: str, data: str = "") -> list[str]:
    files = (data, data) if data else ("sft_train", "sft_val")
    return [
        f"model.path={task}/{model}", f"run.root={task}/runs", "data.allow_overlap=true",
        f"data.train_file={task}/{files[0]}.parquet", f'validation.files=["{task}/{files[1]}.parquet"]',
    ]  # fmt: skip


def run_of(task: Path, model: str, data: str = "") -> SftConfig:
    return load_config(SftConfig, SFT, settings(task, model, data))


@pytest.mark.parametrize(
    ("model", "data", "forms"),
    [("model", "", ("hermes",)), ("pieces", "", ("hermes",)), ("plain", "inline", ("retool",)), ("plain", "words", ())],
)
def test_what_rl_will_accept_passes(task: Path, model: str, data: str, forms: tuple[str, ...]):
    run = run_of(task, model, data)
    assert check_protocols(run, load_tokenizer(run.model.path)) == forms


def test_calls_for_a_model_that_does_not_serve_them_are_refused(task: Path):
    run = run_of(task, "plain")
    with pytest.raises(CheckpointError) as caught:
        check_protocols(run, load_tokenizer(run.model.path))
    message = str(caught.value)
    assert message.startswith(f"{task}/sft_train.parquet, row ") and "without its code" in message
    assert f"It supports retool. Write the rows in that form: retool data sft {task}/sft_train.parquet" in message


def test_preflight_tells_it_and_says_no_more_than_is_true(task: Path):
    def findings(model: str, data: str = ""):
        run = run_of(task, model, data)
        rows = judged("data", lambda: inputs.data(run, all_rows=True, render=True))
        return [*judged("tokenizer", lambda: inputs.tokenizer(run)), *rows]

    bad = findings("plain")
    assert [(each.severity, each.name) for each in bad] == [("ok", "tokenizer"), ("error", "data")]
    assert bad[0].text.endswith("the chat template ends a turn with <|im_end|>")
    good = findings("plain", "inline")
    assert {each.severity for each in good} == {"ok"}
    assert good[1].text == "rows of protocol retool, which the model supports"
    files = ("data.train_file", "validation.files")
    assert [each.text for each in good[2:4]] == [f"{name}: 1 rows render within 512 tokens" for name in files]
