"""How a problem is put to the model: the system turn, the instruction behind it, the protocol.

A model answers well when it is asked as it was trained. So a run records its format beside its
checkpoints, an export carries it, and a file of bare problems is put to the model in that format.
Where a file has prompts of its own, a difference from the model's format is one warning.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from retool_mcore.config.base import is_tables
from retool_mcore.config.shared import END_OF_TURN, FORMAT_FILE
from retool_mcore.data.files import column_names, read_rows, replacing
from retool_mcore.data.prompts import ANSWER_FORMAT, QUESTION_MARK, hermes_prompt
from retool_mcore.errors import DataError

ROWS_READ = 8  # an instruction is the lines that end each of so many prompts
PROMPT_CHARS = 3000  # of a prompt that is shown; the middle of a longer one is left out


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """``system``: text of the system turn, "" for none. ``instruction``: text behind the problem.

    ``protocol``: the tool protocol of the run, "" where it is not known, as after SFT.
    """

    system: str = ""
    instruction: str = ANSWER_FORMAT
    protocol: str = ""

    def messages(self, problem: str) -> list[dict[str, Any]]:
        """The turns that put ``problem``, a text without instructions, to the model."""
        if self.instruction == ANSWER_FORMAT:
            user = hermes_prompt(problem)
        else:
            user = "\n".join(text for text in (problem.strip(), self.instruction) if text)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": user}]

    def differs_from(self, other: "PromptFormat") -> bool:
        """Whether the model would see another prompt; a protocol that is not known fits any."""
        if self.protocol and other.protocol and self.protocol != other.protocol:
            return True
        inline = "retool" in (self.protocol, other.protocol)  # which has an instruction of its own
        return self.system != other.system or (self.instruction != other.instruction and not inline)

    def __str__(self) -> str:
        system = f"system turn {_quoted(self.system)}" if self.system else "no system turn"
        instruction = f"instruction {_quoted(self.instruction)}" if self.instruction else "no instruction"
        return ", ".join((system, instruction, *([f"protocol {self.protocol}"] if self.protocol else [])))

    def write(self, folder: Path, end_of_turn: tuple[str, int] | None = None) -> None:
        """Write the record into a run's folder, whole or not at all.

        ``end_of_turn``: the token that ends the model's turns, and its id. An export makes it eos.
        """
        values: dict[str, Any] = asdict(self)
        if end_of_turn is not None:
            values[END_OF_TURN] = {"token": end_of_turn[0], "id": end_of_turn[1]}
        with replacing(folder / FORMAT_FILE) as draft:
            draft.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def recorded_format(folder: str | Path) -> PromptFormat | None:
    """The format that the run of a model directory recorded; None where there is no record.

    Raises DataError for a record that cannot be read.
    """
    path = Path(folder) / FORMAT_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values.pop(END_OF_TURN, None)
        found = PromptFormat(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no record of a prompt format: {error}. Export the model again.") from error
    if wrong := [name for name, value in asdict(found).items() if not isinstance(value, str)]:
        raise DataError(f"{path}: {wrong[0]} is not a text. Export the model again.")
    return found


def format_of_prompts(prompts: Iterable[Sequence[Mapping[str, Any]]], protocol: str = "") -> PromptFormat:
    """The format of a file's first prompts: their system turn, and the lines that end them all."""
    system, asked, inline = "", list[str](), False
    for messages in islice(prompts, ROWS_READ):
        first: Mapping[str, Any] = messages[0] if messages else {}
        if not asked and first.get("role") == "system" and isinstance(first.get("content"), str):
            system = first["content"].strip()
        user = next((turn.get("content") for turn in messages if turn.get("role") == "user"), None)
        if isinstance(user, str):
            asked.append(user.strip())
            inline = inline or QUESTION_MARK in user
    if inline:
        return PromptFormat(system=system, instruction="", protocol="retool")
    return PromptFormat(system=system, instruction=_instruction(asked), protocol=protocol)


def format_of_file(path: str | Path, protocol: str = "") -> PromptFormat:
    """``format_of_prompts`` of a parquet file for SFT (column messages) or RL (column prompt).

    Raises DataError as ``read_rows``.
    """
    column = "messages" if "messages" in column_names(path) else "prompt"
    rows = (row[column] for _, row in read_rows(path, (column,)))
    return format_of_prompts((row for row in rows if is_tables(row)), protocol)


def difference(model: str, asked: PromptFormat, what: str, remedy: str) -> list[str]:
    """One warning where ``what`` is asked otherwise than the run of ``model`` asked; else none."""
    known = recorded_format(model)
    if known is None or not asked.differs_from(known):
        return []
    return [
        f"{what} is asked otherwise than {model} was trained, which costs accuracy. Here: {asked}. "
        f"The model: {known}. {remedy}"
    ]


def shown_prompt(text: str) -> str:
    """A prompt as the model sees it, for the terminal."""
    half = PROMPT_CHARS // 2
    return text if len(text) <= PROMPT_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"


def _instruction(asked: Sequence[str]) -> str:
    """The lines that end each of several different prompts; of one prompt only our own is known."""
    ends = {text.rpartition("\n")[2] for text in asked}
    if ends == {ANSWER_FORMAT}:
        return ANSWER_FORMAT
    if len(set(asked)) < 2:
        return ""
    backwards = [text.split("\n")[::-1] for text in asked]
    common = [lines[0] for lines in takewhile(lambda lines: len(set(lines)) == 1, zip(*backwards, strict=False))]
    return "\n".join(reversed(common)).strip()


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= 80 else f'"{line[:77]}..."'
