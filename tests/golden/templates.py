"""Write configs/TEMPLATES.md from the tests' list: ``python -m tests.golden.templates``."""

from pathlib import Path

from tests.template_styles import STYLES, Style

FILE = Path(__file__).parents[2] / "configs" / "TEMPLATES.md"
HEAD = """# Chat templates and call formats

`python -m tests.golden.templates` writes this page from the list that
`tests/unit/rollout/test_templates.py` tests. With each of these templates, a rollout and training have the
same tokens and loss mask for the same conversation. Any other template works if later turns do not
change the text of earlier ones. A run checks this at its start and shows the shortest violation. Text-only runs and
protocol `retool` need no tool turns in the template. If a template has no token that ends a turn, training and
rollouts end turns with the tokenizer's eos_token.

`rollout.protocol` sets the call format. With `hermes` and `qwen3_coder`, the engine stops at the last
token of `</tool_call>`, which may be one token or several. With `llama3` and `mistral`, a call ends
with its turn. If a template drops the text before a call, SFT refuses rows with such text: use
protocol `retool` for them. The formats of DeepSeek, Kimi and others are not supported: use protocol
`retool` or your own class (`module:Name`).

| template | text only, `retool` | native calls | text before a call | settings |
|---|---|---|---|---|
"""
REFUSED = """
| refused | message |
|---|---|
"""


def text() -> str:
    taken = "".join(_row(style) for style in STYLES if not style.message)
    refused = "".join(f"| {style.name} | {style.message} |\n" for style in STYLES if style.message)
    return f"{HEAD}{taken}{REFUSED}{refused}"


def _row(style: Style) -> str:
    words = ("kept" if style.words_before_call else "dropped") if style.tools else ""
    own = f'`model.chat_template = "{style.file}"`' if style.name.startswith("a base model") else ""
    args = ", ".join(f"{name} = {str(value).lower()}" for name, value in style.args.items())
    settings = f"`model.template_args = {{ {args} }}`" if args else own
    tools = f"`{style.tools}`" if style.tools else "none"
    return f"| {style.name} | yes | {tools} | {words} | {settings} |\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
