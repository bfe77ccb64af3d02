"""Write the tables of retool_mcore/model/README.md, the supported models, from the parity tests'
list. The words around them are written by hand.

python -m tests.golden.models     # writes what tests/unit/golden compares with
"""

from pathlib import Path

from retool_mcore.model.families import FAMILIES, ONLY
from tests.model_parity import ONE, ROPES, TWO, scalings

README = Path(__file__).parents[2] / "retool_mcore" / "model" / "README.md"
REFUSED = ("dynamic", "longrope")


def text() -> str:
    page = README.read_text(encoding="utf-8")
    kinds = [kind for kind in FAMILIES if any(case.kind == kind for case in ONE)]
    ropes = [*ROPES, *REFUSED]
    lines = [f"| model_type | models | embeddings | {' | '.join(ropes)} |", f"|---|---|---|{'---|' * len(ropes)}"]
    for kind in kinds:
        tied = {case.tied for case in [*ONE, *TWO] if case.kind == kind}
        shown = " and ".join(name for name, value in (("tied", True), ("untied", False)) if value in tied)
        cells = " | ".join(taken(rope, kind) for rope in ropes)
        lines.append(f"| {kind} | {FAMILIES[kind].models} | {shown} | {cells} |")
    lines += ["", "| field | accepted values | why |", "|---|---|---|"]
    for name, only in ONLY.items():
        lines.append(f"| `{name}` | {', '.join(f'`{value}`' for value in only.values) or 'none'} | {only.why} |")
    before, after = page.partition("| model_type |")[0], page.rpartition("|\n")[2]
    return before + "\n".join(lines) + "\n" + after


def taken(rope: str, kind: str) -> str:
    """Of a name in ROPES; the scaling is the same code in every family that has it."""
    if rope == "default" or rope in scalings(kind):
        return "yes"
    return "SFT" if rope.split(maxsplit=1)[0] in scalings(kind) else "no"


if __name__ == "__main__":
    README.write_text(text(), encoding="utf-8")
