"""SFT refuses at its start what RL would refuse after it: rows in a form that the model does not
serve.
"""

import shutil
from pathlib import Path

import pytest

from retool_mcore.config import SftConfig, load_config
from retool_mcore.data.files import write_parquet
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.preflight import inputs
from retool_mcore.preflight.findings import Finding
from retool_mcore.preflight.protocols import check_protocols
from tests.plain_chatml import with_template
from tests.unit.preflight.test_preflight import SFT, judged

INLINE = "<code>\n```python\nprint(2)\n```\n</code>\n<interpreter>\n2\n</interpreter>\n<answer>\n\\boxed{2}\n</answer>"


@pytest.fixture(scope="module")
def models(task: Path) -> Path:
    """The task with its model again, with tags in pieces and with a plain template."""
    shutil.copytree(task / "model", task / "pieces")
    text = (task / "model" / "tokenizer.json").read_text(encoding="utf-8")
    (task / "pieces" / "tokenizer.json").write_text(text.replace("</tool_call>", "</toolcall>"), encoding="utf-8")
    shutil.copytree(task / "model", task / "plain")
    with_template(load_tokenizer(str(task / "model"))).save_pretrained(task / "plain")
    question = {"role": "user", "content": "How much is 1 + 1?"}
    for name, answer in (("inline", INLINE), ("words", "\\boxed{2}")):
        row = {"messages": [question, {"role": "assistant", "content": answer}], "tools": None}
        write_parquet(task / f"{name}.parquet", [row])
    return task


def run_of(folder: Path, model: str, train: str = "sft_train", val: str = "sft_val") -> SftConfig:
    settings = [f"model.path={folder}/{model}", f"run.root={folder}/runs", "data.allow_overlap=true"]
    files = [f"data.train_file={folder}/{train}.parquet", f'validation.files=["{folder}/{val}.parquet"]']
    return load_config(SftConfig, SFT, [*settings, *files])


@pytest.mark.parametrize(
    ("model", "files", "forms"),
    [
        ("model", (), ("hermes",)),
        ("pieces", (), ("hermes",)),
        ("plain", ("inline", "inline"), ("retool",)),
        ("plain", ("words", "words"), ()),
    ],
)
def test_what_rl_will_accept_passes(models: Path, model: str, files: tuple[str, ...], forms: tuple[str, ...]):
    run = run_of(models, model, *files)
    assert check_protocols(run, load_tokenizer(run.model.path)) == forms


def test_preflight_tells_it_and_says_no_more_than_is_true(models: Path):
    def findings(run: SftConfig) -> list[Finding]:
        rows = judged("data", lambda: inputs.data(run, all_rows=True, render=True))
        return [*judged("tokenizer", lambda: inputs.tokenizer(run)), *rows]

    ending, refused = findings(run_of(models, "plain"))
    assert ending.severity == "ok" and ending.text.endswith("the chat template ends a turn with <|im_end|>")
    file = f"{models}/sft_train.parquet"
    assert refused.severity == "error" and refused.text.startswith(f"{file}, row ")
    assert "without its code" in refused.text
    assert f"It supports retool. Write the rows in that form: retool data sft {file}" in refused.text
    good = findings(run_of(models, "plain", "inline", "inline"))
    assert {each.severity for each in good} == {"ok"}
    assert good[1].text == "rows of protocol retool, which the model supports"
    assert good[2].text == "data.train_file: 1 rows render within 512 tokens"
