r"""Instructions that public data puts around its problems, and how they are taken off.

Who trains on two sets wants one way of asking in both, and who compares two sets wants the problems
only. Each wrapper is a record: known texts before or behind a problem, whatever their spacing and
case. Nothing but these texts is taken off.
"""

import re
from dataclasses import dataclass

from retool_mcore.data.prompts import ANSWER_FORMAT, RETOOL_INSTRUCTION

OURS = ("ours, hermes", "ours, retool")
_MARK = re.compile(r"\*{1,2}user question:\*{1,2}")


@dataclass(frozen=True)
class Wrapper:
    """The texts that a publisher puts before (``heads``) or behind (``tails``) a problem."""

    name: str
    heads: tuple[str, ...] = ()
    tails: tuple[str, ...] = ()


WRAPPERS = (
    Wrapper("ours, hermes", tails=(ANSWER_FORMAT,)),
    Wrapper("ours, retool", heads=(RETOOL_INSTRUCTION,)),
    Wrapper(
        "ReTool-SFT",  # what stands before its "*user question:*" goes with that mark
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
        "verl's gsm8k",  # in back quotes: with tools
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
        "a box is asked for",
        tails=(
            "Please put your final answer within \\boxed{}.",
            "Please output the final answer within \\boxed{}.",
        ),
    ),
)


def _pattern(text: str, form: str) -> re.Pattern[str]:
    """The text in any spacing and case. It begins a sentence: what it is cut from stays whole."""
    spelt = r"\s+".join(map(re.escape, text.split()))
    return re.compile(form.format(f"(?-i:{spelt[0]}){spelt[1:]}"), re.IGNORECASE)


_FORMS = [
    (text, each.name, form)
    for each in WRAPPERS
    for texts, form in ((each.heads, r"\A{}"), (each.tails, r"{}\Z"))
    for text in texts
]
# Longer texts first: a shorter one may be the end of a longer one.
_PATTERNS = [(name, _pattern(text, form)) for text, name, form in sorted(_FORMS, key=lambda each: -len(each[0]))]


def unwrap(content: str) -> tuple[str, tuple[str, ...]]:
    """The problem alone, from a user's turn, and the names of the wrappers that were taken off.

    Wrappers in wrappers are taken off, too. A turn of nothing but instructions gives "".
    """
    found: list[str] = []
    text = content.strip()
    if marks := list(_MARK.finditer(text)):
        found.append("the question's mark")
        text = text[marks[-1].end() :].strip()
    while matches := [(name, match) for name, each in _PATTERNS if (match := each.search(text))]:
        name, match = matches[0]
        text = (text[: match.start()] + text[match.end() :]).strip()
        found.append(name)
    return text, tuple(found)


def problem_of(content: str) -> str:
    """The problem alone; see ``unwrap``."""
    return unwrap(content)[0]
