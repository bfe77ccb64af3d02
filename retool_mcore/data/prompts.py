"""How a problem is put to the model, in either protocol."""

from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_FORMAT = "Put your final answer within \\boxed{}."

# The paper's inline form. In ReTool's own data the problem follows this mark, after an instruction
# like ours.
QUESTION_MARK = "*user question:*"
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
    """The user's turn: the problem and, unless it mentions one, the line that asks for a box."""
    problem = problem.strip()
    return problem if "\\boxed" in problem else f"{problem}\n{ANSWER_FORMAT}"


def retool_prompt(problem: str) -> str:
    """The user's turn of the inline form, as the rollout writes it.

    A turn that already has its instruction stays as it is.
    """
    if QUESTION_MARK in problem:
        return problem
    return f"{RETOOL_INSTRUCTION}\n\n{QUESTION_MARK}\n{plain_problem(problem)}"


def retool_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A prompt's turns with the last in the inline form.

    A row of ReTool's own data has its instruction and stays as it is.
    """
    last = messages[-1]
    if QUESTION_MARK in last["content"]:
        return list(messages)
    return [*messages[:-1], {**last, "content": retool_prompt(last["content"])}]


def plain_problem(content: str) -> str:
    """The problem alone, from a user's turn of either form."""
    problem = content.rpartition(QUESTION_MARK)[2] if QUESTION_MARK in content else content
    return problem.strip().removesuffix(ANSWER_FORMAT).strip()
