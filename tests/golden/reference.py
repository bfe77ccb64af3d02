"""Write the reference of all keys of a configuration, configs/README.md, from the schema. The words
before its first section are written by hand.

python -m tests.golden.reference     # writes what tests/unit/golden compares with
"""

from itertools import groupby
from pathlib import Path

from retool_mcore.config.reference import Entry, reference

README = Path(__file__).parents[2] / "configs" / "README.md"


def text() -> str:
    parts = [README.read_text(encoding="utf-8").partition("\n## ")[0]]
    for section, entries in groupby(reference(), lambda entry: entry.section):
        whole = list(entries)
        abouts, keys = [each for each in whole if not each.kind], [each for each in whole if each.kind]
        parts.append(f"\n## `[{section}]`\n")
        parts.extend(about(each, alone=len(abouts) == 1) for each in abouts)
        parts.append("\n| key | type, default | meaning | run |\n|---|---|---|---|\n")
        parts.extend(map(row, keys))
    return "".join(parts)


def about(entry: Entry, *, alone: bool) -> str:
    return f"\n{'' if alone else f'{owners(entry)}: '}{escaped(entry.explanation)}\n"


def row(entry: Entry) -> str:
    default = "required" if entry.default == "required" else f"default `{entry.default}`"
    facts = f"{escaped(entry.kind)}; {default}"
    return f"| `{entry.key}` | {facts} | {escaped(entry.explanation)} | {owners(entry)} |\n"


def owners(entry: Entry) -> str:
    return ", ".join(run.upper() for run in entry.runs)


def escaped(words: str) -> str:
    """Escape the characters that Markdown would take for markup."""
    for sign in "\\*|<":
        words = words.replace(sign, f"\\{sign}")
    return words


if __name__ == "__main__":
    README.write_text(text(), encoding="utf-8")
