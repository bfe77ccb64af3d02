"""The families and positions that are taken, as the parity tests train them.

The table in retool_mcore/model/README.md is made from this list.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

ORIGINAL, LONGEST = 32, 256  # tokens: the context before a scaling, and max_position_embeddings
THETA = 1000.0
ROPES: dict[str, dict[str, Any]] = {  # name -> rope_parameters
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 6.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "yarn with attention_factor": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.5,
        "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False,
    },
    "yarn with mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.5,
        "mscale_all_dim": 0.6,
    },
}  # fmt: skip
SAMPLED = ("default", "linear", "llama3", "yarn")  # those that SGLang computes alike
KINDS = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")  # which have no RoPE scaling


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model that is compared with transformers, and saved after a step at learning rate 0."""

    kind: str
    rope: str
    tied: bool = False
    layout: dict[str, int] = field(default_factory=dict[str, int])
    saved: bool = False

    @property
    def model(self) -> str:
        return f"{self.kind}_{self.rope.replace(' ', '_')}{'_tied' if self.tied else ''}"

    @property
    def name(self) -> str:
        return "_".join([self.model, *(f"{way}{count}" for way, count in self.layout.items())])

    def settings(self) -> dict[str, Any]:
        """What make_model takes."""
        more: dict[str, Any] = {"sliding_window": LONGEST} if self.kind == "mistral" else {}
        if self.kind in HYBRIDS:
            more |= {"full_attention_interval": 2}
        if self.rope == "linear" and not self.kind.startswith("qwen3"):  # whose heads are wider in any case
            more |= {"head_dim": 24}
        positions = ROPES[self.rope] | {"rope_theta": THETA}
        return {"kind": self.kind, "tied": self.tied, "rope_parameters": positions, **more} | {
            "max_position_embeddings": LONGEST,
            "num_hidden_layers": 2,
        }


def scalings(kind: str) -> list[str]:
    """The scalings that a family supports and that SGLang computes alike."""
    return [rope for rope in SAMPLED[1:] if kind not in HYBRIDS and (kind, rope) != ("mistral", "yarn")]


TIED = ("qwen2", "qwen3", "qwen3_5_text", "llama")  # models with experts and Mistral are published untied
ONE = [
    *(Case(kind=kind, rope="default", tied=kind in TIED, saved=True) for kind in (*KINDS, *HYBRIDS)),
    Case(kind="qwen3_5_text", rope="default", saved=True),
    *(Case(kind=kind, rope=rope) for kind in KINDS for rope in scalings(kind)),
    *(Case(kind="qwen2", rope=rope, saved=True) for rope in ROPES if rope not in SAMPLED),
]
HALVED = (("qwen2", "linear"), ("qwen3", "yarn"), ("qwen3_moe", "linear"), ("llama", "yarn"), ("mistral", "llama3"))
TWO = [
    Case(kind="llama", rope="llama3", tied=True, layout={"tp": 2}, saved=True),
    Case(kind="llama", rope="llama3", tied=True, layout={"pp": 2}, saved=True),
    Case(kind="qwen2", rope="yarn with attention_factor", layout={"tp": 2}),
    Case(kind="qwen2", rope="yarn", layout={"cp": 2}),
    *(Case(kind=kind, rope=rope, tied=kind in TIED, layout={"tp": 2}, saved=True) for kind, rope in HALVED),
    *(Case(kind=kind, rope=rope, layout={"pp": 2}, saved=True) for kind, rope in HALVED[2:]),
    *(
        Case(kind=kind, rope="default", tied=kind in TIED and way != "pp", layout={way: 2}, saved=way != "cp")
        for kind in HYBRIDS
        for way in ("tp", "pp", "cp")
    ),
    Case(kind="qwen3_5_moe_text", rope="default", layout={"tp": 2, "ep": 2, "etp": 1}, saved=True),
]


def sequences() -> list[list[int]]:
    """Token ids below and above the context before a scaling."""
    draw = Random(0)
    return [[draw.randrange(2, 272) for _ in range(length)] for length in (ORIGINAL - 2, 200)]
