"""Where the answer is looked for, and where it is not."""

import time

import pytest

from retool_mcore.reward.extract import boxes, extract_answer, last_answer, model_text

CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(1)"}}\n</tool_call>'


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"so \boxed{5}.", "5"),
        (r"first \boxed{4}, no: \boxed{5} it is", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{5", None),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"a { \boxed{5}", "5"),
        (r"\boxed{}", ""),
        ("the answer is 5", None),
        ("", None),
        ("<answer>5</answer>", "5"),
        ("<answer>\n\\boxed{5}\n</answer>", "5"),
        (r"\boxed{4} <answer>5</answer>", "5"),
        (r"<answer>4</answer> or \boxed{5}", "5"),
        ("<answer>4</answer> <answer>5</answer> done", "5"),
        ("<answer>4", None),
        ("```python\nx = 5\n```\nSo \\boxed{5}.", "5"),
        ("```\n\\boxed{5}\n```", "5"),
    ],
)
def test_the_last_box_or_answer_counts(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        f"{CALL}\nuser\n<tool_response>\n\\boxed{{5}}\n</tool_response>\nassistant\nThat was it.",
        '<tool_call>\n{"arguments": {"code": "print(\'\\\\boxed{5}\')"}}\n</tool_call>',
        "<tool_call>\n\\boxed{5}",  # cut off by the budget
        "<tool_response>\n\\boxed{5}",
        "<code>\n```python\n# \\boxed{5}\n```\n</code>\n<interpreter>\n\\boxed{5}\n</interpreter>\n",
        "```python\nprint('\\boxed{5}')\n```\nIt prints the answer.",
        "  ```py\n# \\boxed{5}",
        # Output that the model only pretends to have seen, in tags, in nested tags and in fences.
        "It prints <interpreter>\\boxed{5}</interpreter>",
        "<interpreter><interpreter>1</interpreter>\\boxed{5}</interpreter>",
        "\\boxed{5}\n</interpreter> That is what it prints.",
        "```output\n\\boxed{5}\n```",
        "```tool_output\n\\boxed{5}",
        # What the model said before the last output was not its answer.
        f"It is \\boxed{{5}}. {CALL}\nuser\n<tool_response>\n6\n</tool_response>\nassistant\nHm.",
    ],
)
def test_a_box_in_code_or_output_earns_nothing(response):
    assert extract_answer(response) is None


@pytest.mark.parametrize(
    "turn, answer",
    [
        (r"\boxed{4} <interpreter>\boxed{5}</interpreter>", "4"),
        (r"<tool_response>\boxed{5}</tool_response> so \boxed{4}", "4"),
        ("```output\n\\boxed{5}\n```\nso \\boxed{4}", "4"),
        (r"\boxed{5}</interpreter> so \boxed{4}", "4"),
        (r"<interpreter>\boxed{5}", None),
        (r"<code>print(r'\boxed{5}')</code>", None),
        (r"in a <code> block: <code>1</code> \boxed{4}", "4"),
    ],
)
def test_a_single_turn_too_is_read_outside_of_calls_and_outputs_only(turn, answer):
    assert last_answer(turn) == answer
    assert boxes(turn) == ([answer] if answer else [])


def test_all_boxes_are_found_in_order():
    assert boxes(r"\boxed{1} {\boxed{2}} \boxed{\boxed{3} 4} \boxed{5") == ["1", "2", r"\boxed{3} 4"]


def test_the_answer_after_an_output_counts_with_and_without_control_tokens():
    plain = f"{CALL}\nuser\n<tool_response>\n5\n</tool_response>\nassistant\nIt is \\boxed{{5}}."
    full = (
        f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "It is \\boxed{5}.<|im_end|>"
    )
    assert extract_answer(plain) == extract_answer(full) == "5"
    assert "tool_call" not in model_text(plain)


@pytest.mark.parametrize(
    "unit",
    [
        "\\boxed{",
        "{",
        "}",
        "<tool_call>",
        "<answer>",
        "<code>a",
        "\\",
        "</tool_response>",
        "```python\n",
        " ",
        "<interpreter>",
        "```",
        "\t",
    ],
)
def test_a_hostile_megabyte_takes_linear_time(unit):
    started = time.process_time()
    extract_answer(unit * (1_000_000 // len(unit)))
    assert time.process_time() - started < 3


@pytest.mark.parametrize("tag", ["<code>", "<interpreter>", "<tool_call>", "</interpreter>", "</tool_response>"])
def test_a_tag_in_backticks_is_spoken_of_and_hides_no_box(tag):
    assert extract_answer(f"First \\boxed{{4}}. I close the `{tag}` block. It is \\boxed{{5}}.") == "5"
    assert extract_answer(f"It is \\boxed{{5}}, without a `{tag}`.") == "5"


@pytest.mark.parametrize(
    "text, answer",
    [
        ("```text\n\\boxed{5}\n```", "5"),
        ("<think>so \\boxed{5}", "5"),
        (">>> print(x)\n\\boxed{5}\n", None),
        ("```\n>>> print(x)\n\\boxed{5}\n```", None),
        (">>> print(x)\n6\n\nSo \\boxed{5}", "5"),
        (r"so \boxed 34.", "34"),
        (r"so \boxed 3.5, yes", "3.5"),
        (r"\boxed{34} stands in a \boxed form", "34"),
    ],
)
def test_all_that_the_model_says_counts_but_code_and_output(text, answer):
    assert extract_answer(text) == answer
