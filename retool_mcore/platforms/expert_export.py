"""mbridge exports the experts of a layer by one gather in place of one for each expert.

An example with 128 experts on 2 ranks: a layer's linear_fc1.weight0 to weight63 are stacked and
gathered at once. mbridge's own loop makes 64 gathers, 2,304 matrices of six layers 768.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby, islice
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement

Weights = Iterator[tuple[str, torch.Tensor]]
_EXPERT = re.compile(r"(.+\.mlp\.experts\.linear_fc[12])\.weight\d+")


@dataclass(frozen=True)
class _Experts:
    """One matrix of all experts that this rank has of a layer."""

    prefix: str  # decoder.layers.3.mlp.experts.linear_fc1
    count: int


class _WithoutExperts:
    """A model's chunk as mbridge's own export is to know it."""

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def named_parameters(self) -> Weights:
        return ((name, weight) for name, weight in self._chunk.named_parameters() if _prefix(name) is None)


def _prefix(name: str) -> str | None:
    found = _EXPERT.fullmatch(name)
    return found and found[1]


def _all_experts_of_a_layer_at_once(original: Callable[..., Weights]) -> Callable[..., Weights]:
    """Export the same names, values and order. Experts come where their layer has them."""

    @wraps(original)
    def export_weights(self: Any, models: Sequence[torch.nn.Module]) -> Weights:
        if self.mpu.ep_size == 1 or self.mpu.pp_size > 1:
            return original(self, models)
        return export(self, models)

    def export(bridge: Any, models: Sequence[torch.nn.Module]) -> Weights:
        from mbridge.core.util import unwrap_model

        [chunk] = [unwrap_model(model) for model in models]
        after = _experts_by_what_precedes_them(bridge, chunk)
        experts = ((name, weight) for name, weight in chunk.named_parameters() if _prefix(name) is not None)
        for name, weight in original(bridge, [_WithoutExperts(chunk)]):
            yield name, weight
            for each in after.pop(name, ()):
                mine = [expert.detach() for _, expert in islice(experts, each.count)]
                yield from _whole(bridge, each, mine)
        assert not after, f"these come after no exported weight: {sorted(after)}"

    return export_weights


def _experts_by_what_precedes_them(bridge: Any, chunk: Any) -> dict[str, list[_Experts]]:
    """Exported name of a weight -> the experts that follow it in the model."""
    whole_names = bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
    last, after = "", defaultdict[str, list[_Experts]](list)
    for prefix, run in groupby((name for name, _ in chunk.named_parameters()), _prefix):
        names = list(run)
        if prefix is None:
            last = bridge._weight_name_mapping_mcore_to_hf(whole_names[names[-1]])[-1]
        else:
            after[last].append(_Experts(whole_names[names[0]].rpartition(".")[0], len(names)))
    return after


def _whole(bridge: Any, experts: _Experts, mine: list[torch.Tensor]) -> Weights:
    """Gather ``mine`` over both groups of ranks. Collective."""
    mpu, like = bridge.mpu, mine[0]
    gathered = torch.stack(mine)[None]  # [rank of expert tensor parallelism, expert of this rank, *shape]
    mine.clear()
    if mpu.etp_size > 1:
        gathered = _gather(gathered[0], mpu.etp_size, mpu.etp_group)
    gathered = _gather(gathered, mpu.ep_size, mpu.ep_group)
    for local in range(experts.count):
        for rank, parts in enumerate(gathered[:, :, local].unbind()):
            name = f"{experts.prefix}.weight{rank * experts.count + local}"
            matrix = bridge._weight_merge_across_tp(name, list(parts.unbind()), like)
            yield from zip(*bridge._weight_to_hf_format(name, matrix), strict=True)


def _gather(mine: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    whole = mine.new_empty((size, *mine.shape))
    dist.all_gather_into_tensor(whole.view(-1), mine.view(-1), group=group)
    return whole


EXPERT_EXPORT_PATCH = Patch(
    target="mbridge.core.bridge.Bridge.export_weights",
    replace=_all_experts_of_a_layer_at_once,
    reason="with expert parallelism each matrix of each expert has a gather of its own, in each weight sync",
    applies_to=requirement("mbridge"),
    remove_when="mbridge gathers the experts of a layer together",
)
