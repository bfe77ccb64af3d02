"""The quickstart's task: correct code, disjoint splits, and the same files for a seed."""

import contextlib
import io
import itertools
import json
import re
from dataclasses import asdict, replace

import pyarrow.parquet as pq
import pytest

from retool_mcore.data.chat import render
from retool_mcore.data.task_model import build_tokenizer
from retool_mcore.data.tasks import TaskSpec, make_task, problems, rl_row, text_trace, tokenizer_rows, tool_trace
from retool_mcore.data.tokenizer import load_tokenizer

SMALL = TaskSpec(sft_train=60, sft_val=20, rl_train=30, rl_val=10, eval=25)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    assert make_task(directory, seed=3, spec=SMALL)
    return directory


def rows(directory, split):
    return pq.read_table(directory / f"{split}.parquet").to_pylist()


def run(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})  # our own generated one-liners
    return out.getvalue().rstrip("\n")


def test_a_tool_trace_has_the_output_of_its_code():
    for problem in itertools.islice(problems(seed=1), 6):
        for wrong, answer in ((False, problem.answer), (True, problem.wrong_answer)):
            messages = tool_trace(problem, wrong)["messages"]
            assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
            code = messages[2]["tool_calls"][0]["function"]["arguments"]["code"]
            assert run(code) == messages[3]["content"] == answer
            assert messages[4]["content"].endswith(f"\\boxed{{{answer}}}.")
            asked = [re.findall(r"\d{3}", text) for text in (messages[1]["content"], code)]
            assert asked[1] == (asked[0] if not wrong else asked[0][:2])
        assert text_trace(problem)["messages"][-1]["content"].endswith(f"\\boxed{{{problem.answer}}}.")
        row = rl_row(problem, "eval", 7)
        assert row["reward_model"]["ground_truth"] == problem.answer != problem.wrong_answer
        assert row["extra_info"] == {"split": "eval", "index": 7, "kind": problem.kind}


def test_splits_have_their_sizes_and_share_no_problem(task):
    sizes = {split: size for split, size in asdict(SMALL).items() if isinstance(size, int)}
    turns = {split: "messages" if split.startswith("sft") else "prompt" for split in sizes}
    questions = {split: [row[turns[split]][1]["content"] for row in rows(task, split)] for split in sizes}
    assert {split: len(each) for split, each in questions.items()} == sizes
    assert len(set().union(*questions.values())) == 145


def test_transformers_reads_the_model_and_the_tokenizer_that_was_trained(task):
    from transformers import AutoConfig

    # transformers replaces the pre-tokenizer of a qwen2 directory by Qwen2's own, so training must
    # use that one.
    trained, loaded = build_tokenizer(tokenizer_rows()), load_tokenizer(str(task / "model"))
    row = tool_trace(next(problems(seed=9)), wrong=True)
    assert render(row["messages"], row["tools"], loaded) == render(row["messages"], row["tools"], trained)
    assert loaded.decode(loaded.encode("<tool_call>\n12"), skip_special_tokens=True) == "<tool_call>\n12"
    for mark in ("<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert len(loaded.encode(mark)) == 1
    assert len(loaded.encode("412967")) == 6
    config = AutoConfig.from_pretrained(task / "model")
    assert config.vocab_size % 256 == 0 and config.vocab_size >= len(loaded)
    ids = [loaded.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert [config.eos_token_id, config.pad_token_id, config.bos_token_id] == [*ids, None]
    assert config.rope_parameters["rope_theta"] == 100


def test_a_seed_fixes_the_files_and_an_incomplete_task_is_made_again(task, tmp_path):
    assert make_task(tmp_path, seed=3, spec=SMALL)
    names = json.loads((task / "manifest.json").read_text())["files"]
    first = {name: (task / name).read_bytes() for name in names}
    assert {name: (tmp_path / name).read_bytes() for name in names} == first
    assert not make_task(tmp_path, seed=3, spec=SMALL)
    (tmp_path / "eval.parquet").unlink()
    assert make_task(tmp_path, seed=3, spec=SMALL) and len(rows(tmp_path, "eval")) == 25
    assert make_task(tmp_path, seed=3, spec=replace(SMALL, rl_val=11)) and len(rows(tmp_path, "rl_val")) == 11
    assert make_task(tmp_path, seed=4, spec=SMALL)
    changed = {name for name in first if first[name] != (tmp_path / name).read_bytes()}
    files = {f"{split}.parquet" for split in ("eval", "rl_train", "rl_val", "sft_train", "sft_val")}
    assert changed == files | {"model/model.safetensors"}
