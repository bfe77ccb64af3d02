"""A model that loads as SGLang's do, and buckets for it, as a ModelRunner is given them."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from retool_mcore.platforms.flat_buckets import Bucket, flattened, room
from retool_mcore.platforms.replayed_loads import REPLAY_PATCH

EXPERTS, WIDE, HIDDEN = 3, 4, 8


class Model(torch.nn.Module):
    """Experts' matrices lie in one parameter. What ``loads`` counts are calls of load_weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * WIDE, HIDDEN))
        self.w2 = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDE))
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN, dtype=torch.bfloat16))
        self.padded = torch.nn.Parameter(torch.zeros(6, HIDDEN))  # a vocabulary of 5
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            kind, _, expert = name.partition(".")
            self.load(kind, int(expert or 0), tensor)

    def load(self, kind: str, expert: int, tensor: torch.Tensor) -> None:
        if kind == "gate":
            self.w13.data[expert].narrow(0, 0, WIDE).copy_(tensor)
        elif kind == "up":
            self.w13.data[expert][WIDE:].copy_(tensor)
        elif kind == "down":
            self.w2.data[expert].copy_(tensor.t())
        elif kind == "padded":
            self.padded[:5].data.copy_(tensor)
            self.padded[5:].data.fill_(0)
            self.padded[6:].data.fill_(1)  # of nothing
        else:
            getattr(self, kind).data.copy_(tensor)


def runner(model: torch.nn.Module, **settings: Any) -> Any:
    return SimpleNamespace(model=model, server_args=SimpleNamespace(**{"enable_eplb": False} | settings))


def weights(seed: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    experts = {
        f"{kind}.{expert}": torch.randn(WIDE, HIDDEN) for expert in range(EXPERTS) for kind in ("gate", "up", "down")
    }
    return (
        experts
        | {
            "norm": torch.randn(HIDDEN),  # float32 into bfloat16
            "padded": torch.randn(5, HIDDEN),
            "bias": torch.randn(1).expand(EXPERTS).contiguous(),
        }
        | more
    )


def bucket(named: dict[str, torch.Tensor], *, before: int = 0) -> dict[str, Any]:
    """``before``: bytes of the bucket in front of the first."""
    made = Bucket(before + sum(room(each) for each in named.values()), torch.device("cpu"))
    made.add("", torch.zeros(before, dtype=torch.uint8))
    made.named.clear()
    for name, tensor in named.items():
        made.add(name, tensor)
    return flattened(made.named)


def loads_of_three_syncs() -> str:
    """How often a model searches for the places of weights in three syncs."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    mine = runner(Model())
    for seed in range(3):
        ModelRunner._update_weights_from_flattened_bucket(mine, bucket(weights(seed)))
    same = torch.equal(mine.model.w2[1], weights(2)["down.1"].t())
    return f"{mine.model.loads} searches in three syncs, the last one loaded: {same}"


ENABLES = {REPLAY_PATCH.target: lambda probes: loads_of_three_syncs()}
