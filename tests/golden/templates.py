"""configs/TEMPLATES.md, made from the tests' own list: ``python -m tests.golden.templates``."""

from pathlib import Path

from tests.template_styles import STYLES, Style

FILE = Path(__file__).parents[2] / "configs" / "TEMPLATES.md"
HEAD = """# Chat templates and forms of calls

Made by `python -m tests.golden.templates` from the list that `tests/rollout/test_templates.py` runs
through: for each line a rollout has the tokens and the loss mask that training renders. Any other
template that is stable is taken, too; a start checks it, and shows the shortest example where it is
not. "in words" and `retool` need no tool turns of the template. A turn that the template ends by no
token is ended by the tokenizer's eos_token, in training and in rollouts.

`rollout.protocol` names the form of calls. In `hermes` and `qwen3_coder` the engine stops on the
last token of `</tool_call>`, of one token or several; in `llama3` and `mistral` a call ends with
its turn. Where the template leaves out what the model says before a call, SFT rows that have such
words are refused: use `retool` for them. DeepSeek's, Kimi's and other forms are not taken: use
`retool`, or a class of your own (`module:Name`).

| template | in words, `retool` | calls of its own | words before a call | settings |
|---|---|---|---|---|
"""
REFUSED = """
| refused | the error says |
|---|---|
"""


def text() -> str:
    taken = "".join(_row(style) for style in STYLES if not style.told)
    refused = "".join(f"| {style.name} | {style.told} |\n" for style in STYLES if style.told)
    return f"{HEAD}{taken}{REFUSED}{refused}"


def _row(style: Style) -> str:
    words = ("kept" if style.words_before_call else "left out") if style.tools else ""
    own = f'`model.chat_template = "{style.file}"`' if style.name.startswith("a base model") else ""
    args = ", ".join(f"{name} = {str(value).lower()}" for name, value in style.args.items())
    settings = f"`model.template_args = {{ {args} }}`" if args else own
    tools = f"`{style.tools}`" if style.tools else "none"
    return f"| {style.name} | yes | {tools} | {words} | {settings} |\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
