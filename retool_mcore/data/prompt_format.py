r"""The prompt format of a model: system turn, instruction after the problem, tool protocol.

A model answers best in the format that it was trained with. A run therefore records its format with
its checkpoints, and an export includes the record. Evaluation formats plain problems accordingly.
If a file contains complete prompts, a different format only causes a warning.

The record also contains the date of the run's first start. Chat templates that render today's date
use the recorded date in the run, after a resume, and when the export is evaluated.

Public data sets wrap problems in their own instructions. ``WRAPPERS`` lists these texts; ``unwrap``
strips them, in any spacing and case (except the first letter's), and all text up to
"*user question:*".
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from retool_mcore.config.base import is_table, is_tables
from retool_mcore.config.shared import DATE, END_OF_TURN, FORMAT_FILE
from retool_mcore.data.files import column_names, read_rows
from retool_mcore.errors import DataError
from retool_mcore.run.folder import write_atomic

ANSWER_FORMAT = "Put your final answer within \\boxed{}."

# The paper's inline format. In ReTool's data, the problem follows this mark, after an instruction
# like RETOOL_INSTRUCTION.
QUESTION_HEADER = "*user question:*"
RETOOL_INSTRUCTION = """Solve the problem step by step. You may write Python code where it helps: it is run, and \
what it prints is given back to you. Write each piece of code as a complete script in the form
<code>
```python
...
```
</code>
Its output follows as <interpreter>...</interpreter>. End with the answer in the form
<answer>
\\boxed{...}
</answer>"""


def hermes_prompt(problem: str) -> str:
    """The user turn: the problem and, unless it mentions \\boxed, the line that asks for it."""
    problem = problem.strip()
    return problem if "\\boxed" in problem else f"{problem}\n{ANSWER_FORMAT}"


def retool_prompt(problem: str) -> str:
    """The user turn in the inline format. A turn with QUESTION_HEADER stays unchanged."""
    if QUESTION_HEADER in problem:
        return problem
    return f"{RETOOL_INSTRUCTION}\n\n{QUESTION_HEADER}\n{problem_of(problem)}"


def retool_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A prompt's messages with the last one in the inline format.

    A row of ReTool's data already has the instruction and stays unchanged.
    """
    last = messages[-1]
    if QUESTION_HEADER in last["content"]:
        return list(messages)
    return [*messages[:-1], {**last, "content": retool_prompt(last["content"])}]


OURS = ("ours, hermes", "ours, retool")
_MARK = re.compile(r"\*{1,2}user question:\*{1,2}")


@dataclass(frozen=True)
class Wrapper:
    """Instructions that a data set puts before (``heads``) or after (``tails``) a problem."""

    name: str
    heads: tuple[str, ...] = ()
    tails: tuple[str, ...] = ()


WRAPPERS = (
    Wrapper("ours, hermes", tails=(ANSWER_FORMAT,)),
    Wrapper("ours, retool", heads=(RETOOL_INSTRUCTION,)),
    Wrapper(
        "ReTool-SFT",  # unwrap strips everything up to and including "*user question:*"
        heads=("Answer the following Math Problem and put the answer in the format of \\boxed{answer}",),
        tails=(
            "Remember to place the final answer in the last part using the format: "
            "<answer> \\boxed{'The final answer goes here.'} </answer>",
        ),
    ),
    Wrapper("verl's ReTool recipe", tails=("The answer format must be: \\boxed{'The final answer goes here.'}",)),
    Wrapper(
        "DAPO",
        heads=(
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: \\boxed{$Answer} where $Answer is the answer to the problem.",
        ),
        tails=('Remember to put your answer on its own line after "Answer:".',),
    ),
    Wrapper(
        "simple-evals",
        tails=(
            'Remember to put your answer on its own line after "Answer:", and you do not need to use a \\boxed '
            "command.",
        ),
    ),
    Wrapper(
        "verl's gsm8k",  # the variant with backticks is for runs with tools
        tails=(
            'Let\'s think step by step and output the final answer after "####".',
            "Let's think step by step and output the final answer after `####`.",
        ),
    ),
    Wrapper("verl's MATH", tails=("Let's think step by step and output the final answer within \\boxed{}.",)),
    Wrapper(
        "Qwen2.5-Math",
        heads=("Please reason step by step, and put your final answer within \\boxed{}.",),
        tails=("Please reason step by step, and put your final answer within \\boxed{}.",),
    ),
    Wrapper(
        "a line asking for a box",
        tails=(
            "Please put your final answer within \\boxed{}.",
            "Please output the final answer within \\boxed{}.",
        ),
    ),
)


def _pattern(text: str, form: str) -> re.Pattern[str]:
    """A pattern for ``text`` in any spacing and case, except that the first letter's case counts.

    The text starts a sentence, so a match within a sentence would cut the problem.
    """
    spaced = r"\s+".join(map(re.escape, text.split()))
    return re.compile(form.format(f"(?-i:{spaced[0]}){spaced[1:]}"), re.IGNORECASE)


_FORMS = [
    (text, wrapper.name, form)
    for wrapper in WRAPPERS
    for texts, form in ((wrapper.heads, r"\A{}"), (wrapper.tails, r"{}\Z"))
    for text in texts
]
# Longest first, because a short text may be the end of a longer one.
_PATTERNS = [(name, _pattern(text, form)) for text, name, form in sorted(_FORMS, key=lambda item: -len(item[0]))]


def unwrap(content: str) -> tuple[str, tuple[str, ...]]:
    """Strip known instructions from a user turn; return the problem and the wrappers' names.

    Also strips nested wrappers. A turn that contains only instructions yields "".
    """
    names: list[str] = []
    text = content.strip()
    if marks := list(_MARK.finditer(text)):
        names.append(QUESTION_HEADER)
        text = text[marks[-1].end() :].strip()
    while matches := [(name, match) for name, pattern in _PATTERNS if (match := pattern.search(text))]:
        name, match = matches[0]
        text = (text[: match.start()] + text[match.end() :]).strip()
        names.append(name)
    return text, tuple(names)


def problem_of(content: str) -> str:
    """The problem in a user turn, without known instructions; see ``unwrap``."""
    return unwrap(content)[0]


ROWS_READ = 8  # prompts to compare; the last lines that all of them share are the instruction
PROMPT_CHARS = 3000  # longest prompt to display; longer ones lose their middle


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """A prompt format.

    ``system``: text of the system turn, "" for none. ``instruction``: text after the problem.
    ``protocol``: the run's tool protocol, "" if unknown, as after SFT.
    """

    system: str = ""
    instruction: str = ANSWER_FORMAT
    protocol: str = ""

    def messages(self, problem: str) -> list[dict[str, Any]]:
        """The prompt messages for ``problem``, a text without instructions."""
        if self.instruction == ANSWER_FORMAT:
            user = hermes_prompt(problem)
        else:
            user = "\n".join(text for text in (problem.strip(), self.instruction) if text)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": user}]

    def differs_from(self, other: "PromptFormat") -> bool:
        """Whether the prompts would differ. An unknown protocol matches any."""
        if self.protocol and other.protocol and self.protocol != other.protocol:
            return True
        inline = "retool" in (self.protocol, other.protocol)  # the inline format has its own instruction
        return self.system != other.system or (self.instruction != other.instruction and not inline)

    def __str__(self) -> str:
        system = f"system turn {_quoted(self.system)}" if self.system else "no system turn"
        instruction = f"instruction {_quoted(self.instruction)}" if self.instruction else "no instruction"
        return ", ".join((system, instruction, *([f"protocol {self.protocol}"] if self.protocol else [])))

    def write(self, folder: Path, end_of_turn: tuple[str, int] | None = None) -> None:
        """Write the record to a run's folder atomically. Keeps a recorded date.

        ``end_of_turn``: the end-of-turn token and its id. An export uses it as EOS.
        """
        values: dict[str, Any] = asdict(self)
        if end_of_turn is not None:
            values[END_OF_TURN] = {"token": end_of_turn[0], "id": end_of_turn[1]}
        known = _record(folder)
        _write(folder, values | ({DATE: known[DATE]} if DATE in known else {}))


def recorded_format(folder: str | Path) -> PromptFormat | None:
    """The format recorded in a model directory; None without a record.

    Raises DataError for an unreadable record.
    """
    values, path = _record(folder), Path(folder) / FORMAT_FILE
    if not values:
        return None
    try:
        record = PromptFormat(**{name: value for name, value in values.items() if name not in (DATE, END_OF_TURN)})
    except TypeError as error:
        raise DataError(f"{path} is not a record of a prompt format: {error}. Export the model again.") from error
    if wrong := [name for name, value in asdict(record).items() if not isinstance(value, str)]:
        raise DataError(f"{path}: {wrong[0]} is not text. Export the model again.")
    return record


def record_format(run_dir: Path, file: str, end_of_turn: tuple[str, int], protocol: str = "") -> None:
    """Record the format of the prompts in ``file`` in a run's folder; see ``PromptFormat``."""
    found = format_of_file(file)
    replace(found, protocol=protocol or found.protocol).write(run_dir, end_of_turn)


def date_of(*folders: str | Path) -> date:
    """The date in the first record of ``folders`` that has one, else today's.

    "Today" stays the same within a process, even past midnight. Raises DataError.
    """
    for folder in folders:
        if (day := _record(folder).get(DATE)) is not None:
            try:
                return date.fromisoformat(day)
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"{Path(folder) / FORMAT_FILE}: {DATE} = {day!r} is not a date like 2026-11-29. Correct it."
                ) from error
    return _today()


@lru_cache(maxsize=1)
def _today() -> date:
    return date.today()


def pin_date(folder: Path, model: str) -> date:
    """Return the date of a run or evaluation; record it in ``folder`` if missing.

    A new date is that of ``model`` if it is an export with a record, else today's.
    """
    day, known = date_of(folder, model), _record(folder)
    _write(folder, known | {DATE: day.isoformat()})
    return day


def _record(folder: str | Path) -> dict[str, Any]:
    """A folder's record; {} if there is none."""
    path = Path(folder) / FORMAT_FILE
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not is_table(values):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise DataError(f"{path} is not a record of a prompt format: {error}. Export the model again.") from error
    return values


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / FORMAT_FILE, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def format_of_prompts(prompts: Iterable[Sequence[Mapping[str, Any]]], protocol: str = "") -> PromptFormat:
    """Infer the format of the first ROWS_READ prompts: system turn and common last lines."""
    system, questions, inline = "", list[str](), False
    for messages in islice(prompts, ROWS_READ):
        first: Mapping[str, Any] = messages[0] if messages else {}
        if not questions and first.get("role") == "system" and isinstance(first.get("content"), str):
            system = first["content"].strip()
        user = next((turn.get("content") for turn in messages if turn.get("role") == "user"), None)
        if isinstance(user, str):
            questions.append(user.strip())
            inline = inline or QUESTION_HEADER in user
    if inline:
        return PromptFormat(system=system, instruction="", protocol="retool")
    return PromptFormat(system=system, instruction=_instruction(questions), protocol=protocol)


def format_of_file(path: str | Path, protocol: str = "") -> PromptFormat:
    """``format_of_prompts`` of a parquet file for SFT (column messages) or RL (column prompt).

    Raises DataError like ``read_rows``.
    """
    column = "messages" if "messages" in column_names(path) else "prompt"
    rows = (row[column] for _, row in read_rows(path, (column,)))
    return format_of_prompts((row for row in rows if is_tables(row)), protocol)


def difference(model: str, used: PromptFormat, what: str, remedy: str) -> list[str]:
    """A list with one warning if ``used`` differs from the format recorded for ``model``."""
    known = recorded_format(model)
    if known is None or not used.differs_from(known):
        return []
    return [
        f"{what} uses a prompt format that {model} was not trained with, which costs accuracy. Here: {used}. "
        f"The model: {known}. {remedy}"
    ]


def shown_prompt(text: str) -> str:
    """A prompt shortened for display on a terminal."""
    half = PROMPT_CHARS // 2
    return text if len(text) <= PROMPT_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"


def _instruction(questions: Sequence[str]) -> str:
    """The last lines that all prompts share.

    For a single distinct prompt, only ANSWER_FORMAT is recognised.
    """
    ends = {text.rpartition("\n")[2] for text in questions}
    if ends == {ANSWER_FORMAT}:
        return ANSWER_FORMAT
    if len(set(questions)) < 2:
        return ""
    backwards = [text.split("\n")[::-1] for text in questions]
    common = [lines[0] for lines in takewhile(lambda lines: len(set(lines)) == 1, zip(*backwards, strict=False))]
    return "\n".join(reversed(common)).strip()


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= 80 else f'"{line[:77]}..."'
