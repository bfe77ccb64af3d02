"""What verl does to one response after another around its losses, done by one index.

verl 0.9.1 pads the model's output of a micro-batch row by row, to the shape of its losses. Each row
reads three lengths from the device, which then waits for the host, and has a backward pass of its
own over all tokens. After the last micro-batch it takes the outputs of all apart and puts them
together twice, also those of an update, which nobody reads.

Suffixes: N tokens of all sequences of a micro-batch, B rows padded to W tokens, L response tokens.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from retool_mcore.platforms.packing import KEPT, Rows, is_jagged, jagged, lengths_of, send, starts_of
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement


@lru_cache(maxsize=KEPT)
def _moved(
    prompts: tuple[int, ...], responses: tuple[int, ...], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the N tokens say something of a response's, and where that goes in B * W; int64 [L].

    The model says it one token before.
    """
    counts_B = np.asarray(responses)
    within_L = np.arange(counts_B.sum()) - np.repeat(starts_of(responses), counts_B)
    before_B = starts_of([*map(sum, zip(prompts, responses, strict=True))]) + np.asarray(prompts) - 1
    sources = np.repeat(before_B, counts_B) + within_L
    places = np.repeat(np.arange(len(responses)) * width, counts_B) + within_L
    return send(torch.from_numpy(sources), device), send(torch.from_numpy(places), device)


def _padded_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's view [B, W] of a model's output at the responses; padded batches are left to it."""

    @wraps(original)
    def no_padding_2_padding(tensor: torch.Tensor, data: Any) -> torch.Tensor:
        if not (is_jagged(data["prompts"]) and is_jagged(data["responses"])):
            return original(tensor, data)
        from verl.utils.tensordict_utils import get_non_tensor_data

        values_N = tensor.values() if tensor.is_nested else tensor
        prompts, responses = lengths_of(data["prompts"]), lengths_of(data["responses"])
        assert sum(prompts) + sum(responses) == len(values_N), "an output has as many tokens as its sequences"
        assert all(prompts), "the first token of a response is said of at the prompt's last"
        asked: Any = get_non_tensor_data(data, "max_response_len", -1)
        width: int = max(responses) if asked < 0 else asked
        sources_L, places_L = _moved(prompts, responses, width, values_N.device)
        rest = values_N.shape[1:]
        padded = values_N.new_zeros(len(responses) * width, *rest)
        return padded.index_copy(0, places_L, values_N.index_select(0, sources_L)).view(-1, width, *rest)

    return no_padding_2_padding


def join(parts: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The jagged tensor of a batch from those of its micro-batches, which have these ``rows``."""
    lengths = tuple(chain.from_iterable(lengths_of(part) for part in parts))
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=parts[0].offsets().dtype)
    values = torch.cat([part.values() for part in parts])
    whole = jagged(values, send(offsets, values.device), lengths)
    return Rows(np.argsort([*chain.from_iterable(rows)]).tolist()).of(whole)


def _joined_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's summary of a batch; the outputs of its micro-batches are joined by one index."""

    @wraps(original)
    def postprocess_batch_func(output_lst: list[dict[str, Any]], indices: Any, data: Any) -> dict[str, Any]:
        told = [output.get("model_output", {}) for output in output_lst]
        if indices is None or not all(is_jagged(value) for output in told for value in output.values()):
            return original(output_lst=output_lst, indices=indices, data=data)
        rest = [{name: value for name, value in output.items() if name != "model_output"} for output in output_lst]
        made = original(output_lst=rest, indices=indices, data=data)
        names = dict.fromkeys(chain.from_iterable(told))
        made["model_output"] = {name: join([output[name] for output in told], indices) for name in names}
        return made

    return postprocess_batch_func


PADDING_PATCHES = (
    Patch(
        target="verl.workers.utils.losses.no_padding_2_padding",
        replace=_padded_by_index,
        reason="it reads three lengths of each response back from the device, which has no work meanwhile",
        applies_to=requirement("verl"),
        remove_when="verl pads a model's output by one index, from lengths that it has on the host",
    ),
    Patch(
        target="verl.workers.engine.megatron.transformer_impl.postprocess_batch_func",
        replace=_joined_by_index,
        reason="it takes the outputs of all micro-batches apart by row, and puts them together twice",
        applies_to=requirement("verl"),
        remove_when="verl joins the outputs of micro-batches by one index",
    ),
)
