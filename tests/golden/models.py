"""Write retool_mcore/model/README.md, the table of supported models, from the parity tests' list.

python -m tests.golden.models     # writes what test_model_table.py compares with
"""

from pathlib import Path

from retool_mcore.model.families import FAMILIES, ONLY
from retool_mcore.model.rope import NEEDED
from tests.model_parity import ONE, ROPES, SAMPLED, TWO

README = Path(__file__).parents[2] / "retool_mcore" / "model" / "README.md"
HEAD = """\
# model: which models can be trained

`python -m tests.golden.models` writes this page from `tests/model_parity.py`, the list of models that the parity
tests train. Change the list, not the page.

A run trains a model exactly as its config.json describes it. If it cannot, it refuses the model before loading it and
names the field. `families.py` lists for each field whether training applies it, ignores it safely, or accepts only some
values. `tensors.py` compares the checkpoint's tensors with those that training reads. A run makes the same checks for a
hub name and for a folder. An export has the config.json, tensor names and shapes of its source.

| file | does |
|---|---|
| `families.py`, `rope.py` | model families, fields of config.json, rotary positions |
| `check.py` | checks that a run fits its model, without starting an engine |
| `files.py`, `tensors.py` | read a model's folder; compare its tensors with those that training uses |
| `shape.py` | a model's shape, memory and arithmetic; layers to recompute; shapes of published models |
| `adapter.py` | LoRA adapters on disk; frozen weights in FP8 |

"""
TAIL = """\

In the first table, the columns from "default" on are kinds of RoPE scaling.

- "yes": SFT and RL support it. Log-probs of Megatron and transformers agree within 1e-4 in float32, for sequences
  within and beyond the original context (`tests/parity/test_model_parity.py`). SGLang rotates heads by the same angles
  (`tests/unit/platforms/test_sglang_positions.py`).
- "SFT": only SFT supports it. Log-probs of Megatron and transformers agree, but SGLang samples with another factor. RL
  refuses the model and names the field.
- "no": a run refuses it. dynamic and longrope depend on the length of a sequence, and a packed batch has several
  lengths.
- A model with a sliding window (Mistral, `use_sliding_window`) trains on sequences up to the window's length.
- In SFT, yarn extends the context to `factor` times the original one, even if max_position_embeddings is smaller, as
  in the instructions of Qwen2.5's model card. In RL, verl and SGLang limit the context to max_position_embeddings, and
  a run prints the value to set.
- Platform ascend refuses RoPE scaling, because no test shows that MindSpeed applies it.
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
    lines += ["", "| field | accepted values | why |", "|---|---|---|"]
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
