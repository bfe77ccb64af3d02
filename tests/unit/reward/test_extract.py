"""Where the answer is looked for, and where it is not: each case is a row of extract.jsonl."""

import time
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.data.files import read_jsonl
from retool_mcore.reward.extract import boxes, extract_answer, last_answer

CASES = [case for _, case in read_jsonl(Path(__file__).with_name("extract.jsonl"))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.get("response", case.get("turn")))[:40])
def test_the_answer_is_the_models_last_box_outside_of_code_and_output(case: dict[str, Any]):
    if (turn := case.get("turn")) is None:
        assert extract_answer(case["response"]) == case["answer"]
    else:
        assert last_answer(turn) == case["answer"]
        assert boxes(turn) == ([case["answer"]] if case["answer"] else [])


def test_all_boxes_are_found_in_order():
    assert boxes(r"\boxed{1} {\boxed{2}} \boxed{\boxed{3} 4} \boxed{5") == ["1", "2", r"\boxed{3} 4"]


@pytest.mark.parametrize("unit", ["\\boxed{", "{", "<tool_call>", "<code>a", "</tool_response>", "```python\n", " "])
def test_a_hostile_megabyte_takes_linear_time(unit: str):
    started = time.process_time()
    extract_answer(unit * (1_000_000 // len(unit)))
    assert time.process_time() - started < 3


@pytest.mark.parametrize("tag", ["<code>", "<interpreter>", "<tool_call>", "</interpreter>", "</tool_response>"])
def test_a_tag_in_backticks_is_text_and_hides_no_box(tag: str):
    assert extract_answer(f"First \\boxed{{4}}. I close the `{tag}` block. It is \\boxed{{5}}.") == "5"
    assert extract_answer(f"It is \\boxed{{5}}, without a `{tag}`.") == "5"
