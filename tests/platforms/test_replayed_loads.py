"""A bucket's second load has the effect of SGLang's own load of it, by the copies of the first."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed")
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.replayed_loads import LOADS, _Copies, by_the_same_copies
from tests.platforms.loads import HIDDEN, Model, bucket, runner, weights

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")


@pytest.fixture(scope="module")
def original() -> Callable[..., Any]:
    get_platform("cpu").activate()
    from sglang.srt.model_executor.model_runner import ModelRunner

    found: Any = ModelRunner._update_weights_from_flattened_bucket
    return getattr(found, "__wrapped__", found)


def check(original: Callable[..., Any], model: Model, buckets: Iterable[dict[str, Any]], searches: int) -> Any:
    """After each bucket ``model`` is as if SGLang had loaded it; all took so many searches."""
    update, mine, reference = by_the_same_copies(original), runner(model), runner(type(model)())
    for each in buckets:
        for tensor in mine.model.parameters():
            tensor.data.fill_(float("nan"))  # as memory is that an engine gave away while it slept
        reference.model.load_state_dict(mine.model.state_dict())
        assert update(mine, each) == original(reference, each) == (True, "Success")
        for name, tensor in mine.model.state_dict().items():
            torch.testing.assert_close(tensor, reference.model.state_dict()[name], rtol=0, atol=0, equal_nan=True)
    assert mine.model.loads == searches
    return mine


def test_three_buckets_alike_are_searched_through_once(original):
    mine = check(original, Model(), [bucket(weights(seed)) for seed in range(3)], searches=1)
    assert not any(tensor.isnan().any() for tensor in mine.model.parameters())
    assert mine.model.padded[5].tolist() == [0.0] * HIDDEN
    [load] = mine.__dict__[LOADS].values()
    sizes = [len(step.into) if isinstance(step, _Copies) else "fill" for step in load.steps]
    assert sizes == [7, 3, 1, "fill", "fill", 1], "what is not alike is copied by itself"


def test_buckets_that_differ_are_searched_through_each_once(original):
    first, other = weights(0), weights(1)
    named = {"gate.0": "up.0", "up.0": "gate.0"}
    norm = first["norm"]
    apart = [
        first,
        dict(reversed(first.items())),
        {named.get(name, name): each for name, each in first.items()},
        {name: each for name, each in first.items() if name != "norm"},
        {"norm": norm},
        {"norm": norm[:1].clone()},  # for all of it
        {"norm": norm.bfloat16()},
        {"norm": norm.half()},
    ]
    buckets = [bucket(each) for each in apart]
    again = [bucket({name: (each * 2) for name, each in part.items()}) for part in apart]
    searches = len(apart) + 1
    check(original, Model(), [*buckets, *again, bucket(other), bucket({"norm": norm}, before=64)], searches=searches)


def test_a_bucket_may_lie_anywhere_in_its_memory(original):
    def moved(seed: int, by: int) -> dict[str, Any]:
        made = bucket(weights(seed))
        memory = torch.zeros(by + made["flattened_tensor"].numel(), dtype=torch.uint8)
        memory[by:] = made["flattened_tensor"]
        return made | {"flattened_tensor": memory[by:]}

    check(original, Model(), [moved(0, 64), moved(1, 0), moved(2, 512)], searches=1)


def test_a_tensor_that_was_moved_is_looked_for_again(original):
    update, mine = by_the_same_copies(original), runner(Model())
    update(mine, bucket(weights(0)))
    mine.model.w2.data = torch.zeros_like(mine.model.w2)
    update(mine, bucket(weights(1)))
    assert torch.equal(mine.model.w2[0], weights(1)["down.0"].t())
    mine.model.bias = torch.zeros_like(mine.model.bias)
    update(mine, bucket(weights(2)))
    assert torch.equal(mine.model.bias, weights(2)["bias"])
    assert mine.model.loads == 3
    update(mine, bucket(weights(3)))
    assert torch.equal(mine.model.bias, weights(3)["bias"]) and mine.model.loads == 3


class _Computes(Model):
    def load(self, kind: str, expert: int, tensor: torch.Tensor) -> None:
        if kind == "bias":
            tensor = tensor * 2
        super().load(kind, expert, tensor)


class _Scalar(Model):
    def load(self, kind: str, expert: int, tensor: torch.Tensor) -> None:
        if kind == "bias":
            self.bias.fill_(tensor[0].item())
        else:
            super().load(kind, expert, tensor)


class _Elsewhere(Model):
    """It copies what came with no bucket."""

    kept = torch.ones(3)

    def load(self, kind: str, expert: int, tensor: torch.Tensor) -> None:
        super().load(kind, expert, self.kept if kind == "bias" else tensor)


class _Keeps(Model):
    """It copies to where no parameter and no buffer is, so that nobody sees when that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.ones(3)]

    def load(self, kind: str, expert: int, tensor: torch.Tensor) -> None:
        if kind == "bias":
            self.kept[0].copy_(tensor)
        super().load(kind, expert, tensor)


class _Twice(Model):
    """The last of two matrices counts."""

    def load(self, kind: str, expert: int, tensor: torch.Tensor) -> None:
        super().load(kind, 0 if kind == "gate" else expert, tensor)


@pytest.mark.parametrize("model", [_Computes, _Scalar, _Elsewhere, _Keeps, _Twice])
def test_a_load_that_is_more_than_copies_is_done_as_ever(original, model: type[Model]):
    check(original, model(), [bucket(weights(seed)) for seed in range(3)], searches=3)


class _PadsFirst(Model):
    """As SGLang does on a CPU: padding before and after what is copied, which orders them."""

    def load(self, kind: str, expert: int, tensor: torch.Tensor) -> None:
        if kind == "down":
            self.w2.data[expert].copy_(tensor.t())
            self.w2.data[expert].zero_()
            self.w2.data[expert][:7].copy_(tensor.t()[:7])
        elif kind == "up":
            super().load(kind, expert, tensor)
            self.w13.data[expert][7:].fill_(3.0)
        else:
            super().load(kind, expert, tensor)


def test_padding_and_copies_keep_their_order(original):
    mine = check(original, _PadsFirst(), [bucket(weights(seed)) for seed in range(3)], searches=1)
    assert mine.model.w2[1][7].tolist() == [0.0] * 4 and mine.model.w13[2][7].tolist() == [3.0] * HIDDEN


def test_experts_that_move_between_ranks_are_looked_for_each_time(original):
    update, mine = by_the_same_copies(original), runner(Model(), enable_eplb=True)
    for seed in range(3):
        update(mine, bucket(weights(seed)))
    assert mine.model.loads == 3


def test_a_load_that_fails_is_not_repeated(original):
    update, mine = by_the_same_copies(original), runner(Model())
    named = weights(0)
    for _ in range(2):
        with pytest.raises(AttributeError, match="unheard"):
            update(mine, bucket({**named, "unheard": torch.ones(1)}))
    assert mine.model.loads == 2
