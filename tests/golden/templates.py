"""Write the tables of configs/TEMPLATES.md from the tests' list; the words before them are written
by hand: ``python -m tests.golden.templates``.
"""

from pathlib import Path

from tests.template_styles import STYLES, Style

FILE = Path(__file__).parents[2] / "configs" / "TEMPLATES.md"
TAKEN = "| template | text only, `retool` | native calls | text before a call | settings |\n|---|---|---|---|---|\n"
REFUSED = "\n| refused | message |\n|---|---|\n"


def text() -> str:
    before = FILE.read_text(encoding="utf-8").partition("| template |")[0]
    taken = "".join(_row(style) for style in STYLES if not style.message)
    refused = "".join(f"| {style.name} | {style.message} |\n" for style in STYLES if style.message)
    return f"{before}{TAKEN}{taken}{REFUSED}{refused}"


def _row(style: Style) -> str:
    words = ("kept" if style.words_before_call else "dropped") if style.tools else ""
    own = f'`model.chat_template = "{style.file}"`' if style.name.startswith("a base model") else ""
    args = ", ".join(f"{name} = {str(value).lower()}" for name, value in style.args.items())
    settings = f"`model.template_args = {{ {args} }}`" if args else own
    tools = f"`{style.tools}`" if style.tools else "none"
    return f"| {style.name} | yes | {tools} | {words} | {settings} |\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
