"""Makes a small set of code problems with hidden tests, and a tiny model with random weights.

    python -m configs.examples.unit_tests_data runs/unit_tests      # then: rl_unit_tests_cpu.toml

A problem asks for f(x) = a * x + b or a * x - b. An SFT row shows a submission and its result. In
half of the rows the code lacks the constant b; RL has to unlearn this mistake.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.examples.unit_tests import Submit
from retool_mcore.data.files import write_parquet
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tool import CODE_INTERPRETER

SYSTEM_PROMPT = "Write the function and submit it."
SIZES = {"sft_train": 4096, "sft_val": 64, "rl_train": 512, "rl_val": 32}
INPUTS = (2, 3, 7)


def problems(seed: int) -> Iterator[tuple[str, str, str, str]]:
    """Question, right code, wrong code and tests. Problems are distinct, so splits share none."""
    # Two digits each, because tiny models learn to copy only numbers of a fixed width.
    numbers = list(itertools.product(range(11, 100), range(11, 100), "+-"))
    random.Random(f"unit tests {seed}").shuffle(numbers)
    for a, b, sign in numbers:
        cases = [[[x], a * x + b if sign == "+" else a * x - b] for x in INPUTS]
        question = f"Write f(x), which returns {a} times x {'plus' if sign == '+' else 'minus'} {b}."
        code = f"f = lambda x: {a} * x"
        yield question, f"{code} {sign} {b}", code, json.dumps({"function": "f", "cases": cases})


def prompt(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def sft_row(question: str, code: str, *, right: bool) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": Submit.name, "arguments": {"code": code}}}
    output = f"{len(INPUTS) if right else 0} of {len(INPUTS)} tests passed"
    messages = [
        *prompt(question),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": output},
        {"role": "assistant", "content": "It is submitted."},
    ]
    return {"messages": messages, "tools": [CODE_INTERPRETER, Submit().schema]}


def rl_row(question: str, tests: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "unit_tests",
        "prompt": prompt(question),
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": tests},
        "extra_info": {"index": index},
    }


def make(folder: Path, sizes: dict[str, int] = SIZES, seed: int = 0) -> None:
    """Write model/, sft_{train,val}.parquet and rl_{train,val}.parquet."""
    stream, draw = problems(seed), random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in sizes.items():
        rows: list[dict[str, Any]] = []
        for index in range(count):
            question, right, wrong, tests = next(stream)
            good = draw.random() < 0.5
            shown = sft_row(question, right if good else wrong, right=good)
            rows.append(shown if split.startswith("sft") else rl_row(question, tests, index))
        write_parquet(folder / f"{split}.parquet", rows)
    samples = [sft_row(q, r, right=True) for q, r, _, _ in (next(stream) for _ in range(64))]
    samples += [sft_row(q, w, right=False) for q, _, w, _ in (next(stream) for _ in range(64))]
    write_model(folder / "model", build_tokenizer(samples), seed)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
