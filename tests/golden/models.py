"""Write the table of models that are taken, retool_mcore/model/README.md, from what is tested.

python -m tests.golden.models     # writes what test_model_table.py compares with
"""

from pathlib import Path

from retool_mcore.model.families import FAMILIES, ONLY
from retool_mcore.model.rope import NEEDED
from tests.model_parity import ONE, ROPES, SAMPLED, TWO

README = Path(__file__).parents[2] / "retool_mcore" / "model" / "README.md"
HEAD = """\
# Which models are trained

Written by `python -m tests.golden.models` from the list that the parity tests train,
`tests/model_parity.py`; change it there.

A model is trained as its config.json says, or refused before anything is loaded, by the name of the
field. `families.py` says of each field whether it is applied, harmless, or has values that alone
are taken; `tensors.py` compares the checkpoint's tensors with those that training reads. A hub name
is judged like a folder. An export has its source's config.json, tensor names and shapes.

"""
TAIL = """\

- "yes": log-probabilities of Megatron and transformers are within 1e-4 in float32, below and above
  the context before the scaling (`tests/numerics/test_model_parity.py`), and SGLang turns heads by
  the same angles (`tests/platforms/test_sglang_positions.py`).
- "SFT": so are those of Megatron and transformers, and SGLang samples with another factor; RL
  refuses it by name.
- "no": refused by name. dynamic and longrope depend on the length of a sequence, and a packed batch
  has several.
- A window (Mistral, `use_sliding_window`) is taken for sequences that are not longer.
- yarn makes a model reach `factor` times its original context in SFT, also where
  max_position_embeddings is the smaller number, as on Qwen2.5's page. verl and SGLang keep to
  max_position_embeddings: RL says which number to write there.
- On platform ascend scaled positions are refused: nothing has shown that MindSpeed heeds them.
"""
REFUSED = ("dynamic", "longrope")


def text() -> str:
    kinds = [kind for kind in FAMILIES if any(case.kind == kind for case in ONE)]
    ropes = [*ROPES, *REFUSED]
    lines = [f"| model_type | models | embeddings | {' | '.join(ropes)} |", f"|---|---|---|{'---|' * len(ropes)}"]
    for kind in kinds:
        tied = {case.tied for case in [*ONE, *TWO] if case.kind == kind}
        shown = " and ".join(name for name, value in (("tied", True), ("untied", False)) if value in tied)
        cells = " | ".join(taken(rope) for rope in ropes)
        lines.append(f"| {kind} | {FAMILIES[kind].models} | {shown} | {cells} |")
    lines += ["", "| field | taken | why |", "|---|---|---|"]
    for name, only in ONLY.items():
        lines.append(f"| `{name}` | {', '.join(f'`{value}`' for value in only.values) or 'none'} | {only.why} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


def taken(rope: str) -> str:
    """Of a name in ROPES; the scaling is the same code in every family."""
    if rope in SAMPLED:
        return "yes"
    return "SFT" if rope.split(maxsplit=1)[0] in NEEDED else "no"


if __name__ == "__main__":
    README.write_text(text(), encoding="utf-8")
