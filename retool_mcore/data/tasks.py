"""Generates the quickstart's task: arithmetic word problems in the schema of ReTool's data.

A problem has three-digit operands and a six-digit answer. A tiny model cannot compute it directly,
but one line of Python can. Numbers have fixed widths because a tiny model learns to copy them in a
hundred steps, versus thousands of steps for varying widths.

There are two kinds of SFT rows. A tool trace contains the problem, a code call, the interpreter's
output and the boxed answer. In a fixed fraction of tool traces, the code has a plausible bug (an
inclusive range without its last number, a dropped operand), and the output and boxed answer are the
results of that code. A text trace offers no tools and boxes the correct answer immediately, so that
the text-only baseline is trained on the format and on correct answers. RL with the tool can learn
to prefer correct code.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retool_mcore.data import rl
from retool_mcore.data.files import replacing, write_parquet
from retool_mcore.data.prompt_format import PromptFormat
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.errors import DataError

DATA_SOURCE = "retool_mcore/arithmetic"
SYSTEM_PROMPT = "Solve the problem. Put the answer in \\boxed{}."
FORMAT = PromptFormat(system=SYSTEM_PROMPT, instruction="")
FORMAT_VERSION = 2  # increment when a change makes the same seed produce different files
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Kind:
    """A kind of problem with three-digit operands a, b, c, and its correct and wrong code."""

    name: str
    question: str
    right: str
    wrong: str
    answer: Callable[[int, int, int], int]
    wrong_answer: Callable[[int, int, int], int]
    ranges: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # inclusive; (0, 0) for an unused c


KINDS = (
    Kind(
        "range",
        "What is the sum of the integers from {a} to {b}, inclusive?",
        "print(sum(range({a}, {b} + 1)))",
        "print(sum(range({a}, {b})))",
        lambda a, b, c: sum(range(a, b + 1)),
        lambda a, b, c: sum(range(a, b)),
        ((100, 499), (600, 999), (0, 0)),
    ),
    Kind(
        "left",
        "A shop gets {a} boxes of {b} pens and sells {c} pens. How many pens are left?",
        "print({a} * {b} - {c})",
        "print({a} * {b})",
        lambda a, b, c: a * b - c,
        lambda a, b, c: a * b,
        ((100, 999), (100, 999), (100, 999)),
    ),
    Kind(
        "seats",
        "A hall has {a} rows of {b} seats, and {c} more seats upstairs. How many seats does it have?",
        "print({a} * {b} + {c})",
        "print({a} * {b})",
        lambda a, b, c: a * b + c,
        lambda a, b, c: a * b,
        ((100, 999), (100, 999), (100, 999)),
    ),
)


@dataclass(frozen=True)
class GeneratedProblem:
    kind: str
    question: str
    answer: str
    right_code: str
    wrong_code: str
    wrong_answer: str


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Sizes of the splits in rows. No problem is in two splits."""

    sft_train: int = 6400
    sft_val: int = 256
    rl_train: int = 2048
    rl_val: int = 128
    eval: int = 256
    text_fraction: float = 0.15  # of SFT rows
    wrong_fraction: float = 0.55  # of tool traces: those with wrong code


def problems(seed: int) -> Iterator[GeneratedProblem]:
    """Yield distinct problems forever, cycling through the kinds. The seed sets the numbers."""
    rng = random.Random(f"{DATA_SOURCE} {FORMAT_VERSION} {seed}")
    seen: set[str] = set()
    while True:
        for kind in KINDS:
            while (problem := _random_problem(kind, rng)) is None or problem.question in seen:
                pass
            seen.add(problem.question)
            yield problem


def _random_problem(kind: Kind, rng: random.Random) -> GeneratedProblem | None:
    a, b, c = (rng.randint(*bounds) for bounds in kind.ranges)
    answer, wrong = kind.answer(a, b, c), kind.wrong_answer(a, b, c)
    if not all(100_000 <= value <= 999_999 for value in (answer, wrong)):
        return None
    numbers = {"a": a, "b": b, "c": c}
    texts = (kind.question.format(**numbers), str(answer), kind.right.format(**numbers), kind.wrong.format(**numbers))
    return GeneratedProblem(kind.name, *texts, str(wrong))


def tool_trace(problem: GeneratedProblem, wrong: bool) -> dict[str, Any]:
    """An SFT row {messages, tools} with the code, its output, and the output as the answer."""
    code, output = (problem.wrong_code, problem.wrong_answer) if wrong else (problem.right_code, problem.answer)
    messages = [
        *FORMAT.messages(problem.question),
        {"role": "assistant", "content": "Let me run code.", "tool_calls": [tool_call(code)]},
        {"role": "tool", "content": output},
        {"role": "assistant", "content": f"The answer is \\boxed{{{output}}}."},
    ]
    return {"messages": messages, "tools": [CODE_INTERPRETER]}


def text_trace(problem: GeneratedProblem) -> dict[str, Any]:
    """An SFT row without tools that answers correctly at once."""
    reply = {"role": "assistant", "content": f"The answer is \\boxed{{{problem.answer}}}."}
    return {"messages": [*FORMAT.messages(problem.question), reply], "tools": None}


def rl_row(problem: GeneratedProblem, split: str, index: int) -> dict[str, Any]:
    """A row in verl's RL schema."""
    row = rl.rl_row(problem.question, problem.answer, DATA_SOURCE, split, index, prompt_format=FORMAT)
    row["extra_info"]["kind"] = problem.kind
    return row


def tokenizer_rows() -> list[dict[str, Any]]:
    """One row per kind of problem and of trace; together they contain all fixed text."""
    stream = problems(seed=0)
    sample = [next(stream) for _ in KINDS]
    return [
        row
        for problem in sample
        for row in (tool_trace(problem, False), tool_trace(problem, True), text_trace(problem))
    ]


def sft_rows(
    stream: Iterator[GeneratedProblem], count: int, spec: TaskSpec, rng: random.Random
) -> list[dict[str, Any]]:
    """``count`` SFT rows in random order, with the fractions of ``spec``."""
    num_text = round(count * spec.text_fraction)
    num_wrong = round((count - num_text) * spec.wrong_fraction)
    kinds = ["text"] * num_text + ["wrong"] * num_wrong + ["right"] * (count - num_text - num_wrong)
    rng.shuffle(kinds)
    chosen = zip(kinds, itertools.islice(stream, count), strict=True)
    return [text_trace(problem) if kind == "text" else tool_trace(problem, kind == "wrong") for kind, problem in chosen]


def make_task(directory: str | Path, seed: int = 0, spec: TaskSpec | None = None) -> bool:
    """Write the task for ``seed``: a model, SFT, RL and evaluation data, and a manifest.

    The files are model/, sft_{train,val}.parquet, rl_{train,val}.parquet, eval.parquet and
    manifest.json. The manifest lists every file and is written last. Returns False without writing
    if a manifest with the same seed and sizes exists and all its files are present. Raises
    DataError if the task cannot be written.
    """
    directory, spec = Path(directory), spec or TaskSpec()
    identity = {"format": FORMAT_VERSION, "seed": seed, "sizes": asdict(spec)}
    if _is_whole(directory, identity):
        return False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST).unlink(missing_ok=True)
        write_model(directory / "model", build_tokenizer(tokenizer_rows()), seed)
    except OSError as error:
        raise DataError(
            f"{directory}: the task cannot be written there: {error.strerror or error}. Name another folder."
        ) from error
    stream = problems(seed)
    rng = random.Random(f"sorts {seed}")
    for split in ("sft_train", "sft_val"):
        write_parquet(directory / f"{split}.parquet", sft_rows(stream, getattr(spec, split), spec, rng))
    for split in ("rl_train", "rl_val", "eval"):
        chosen = itertools.islice(stream, getattr(spec, split))
        write_parquet(
            directory / f"{split}.parquet", [rl_row(problem, split, index) for index, problem in enumerate(chosen)]
        )
    with replacing(directory / MANIFEST) as temporary:
        files = [*directory.glob("*.parquet"), *(directory / "model").iterdir()]
        names = sorted(str(file.relative_to(directory)) for file in files)
        Path(temporary).write_text(json.dumps({**identity, "files": names}, indent=2) + "\n")
    return True


def _is_whole(directory: Path, identity: dict[str, Any]) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        known = {name: manifest.get(name) for name in identity}
        return known == identity and all((directory / file).exists() for file in manifest["files"])
    except (OSError, ValueError, KeyError, AttributeError):
        return False
