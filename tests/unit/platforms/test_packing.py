"""Packing, padding and joining of platforms/patches_verl.py, compared with verl's functions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from retool_mcore.platforms import get_platform
from retool_mcore.platforms import patches_verl as packing
from retool_mcore.verl.plugin import assert_loaded

if torch.accelerator.is_available():
    pytest.skip("platform cpu refuses an accelerator", allow_module_level=True)
get_platform("cpu").activate()  # verl imports here
assert_loaded()
from megatron.core import parallel_state  # noqa: E402
from verl.models.mcore import util  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.engine import utils as verls_engine  # noqa: E402
from verl.workers.utils import padding as verls  # noqa: E402

pack = packing.packed_by_index(util.preprocess_thd_engine)
unpack = packing.unpacked_by_index(util.postprocess_thd_engine)
select_rows = packing.selected_by_index(tu.index_select_tensor_dict)
pad = packing.padded_by_index(verls.no_padding_2_padding)
join = packing.joined_by_index(verls_engine.postprocess_batch_func)
some_rows = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=6)
some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)
BOUNDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def nested(lengths, *, width=()):
    """Sequences of the numbers from 1 on, each once; ``width``: further dimensions."""
    rows, start = [], 1
    for length in lengths:
        column = torch.arange(start, start + length)
        rows.append(column.view(-1, *(1 for _ in width)).expand(-1, *width).clone())
        start += length
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def lists(jagged):
    return [row.tolist() for row in jagged.unbind()]


@pytest.fixture
def parallel(monkeypatch):
    """Set Megatron's size of tensor parallelism."""

    def set_to(tp=1):
        sizes = {"tensor_model_parallel_world_size": tp, "context_parallel_world_size": 1}
        for name, value in {**sizes, "context_parallel_rank": 0, "context_parallel_group": None}.items():
            monkeypatch.setattr(parallel_state, f"get_{name}", lambda value=value: value)

    return set_to


def test_packed_rows_labels_and_positions_are_verls_and_come_back_with_their_gradient(parallel):
    @settings(max_examples=60)
    @given(some_lengths, st.booleans(), st.sampled_from([1, 2, 3]))
    def compare(lengths, fp8, tp):
        ids = nested(lengths)
        parallel(tp)
        rows, params, positions = pack(ids, use_fp8_padding=fp8)
        want_rows, want_params, want_positions = util.preprocess_thd_engine(ids, use_fp8_padding=fp8)
        assert rows.tolist() == want_rows.tolist()
        assert positions is not None and want_positions is not None
        filled = rows != 0  # tokens are numbered from 1 on
        assert positions[filled].tolist() == want_positions[filled].tolist()
        for name in BOUNDS:
            got, want = getattr(params, name), getattr(want_params, name)
            assert (got.tolist(), got.dtype) == (want.tolist(), want.dtype)
        assert (params.max_seqlen_q, params.max_seqlen_kv) == (want_params.max_seqlen_q, want_params.max_seqlen_kv)

        labels = pack(ids, use_fp8_padding=fp8, need_roll=True)[0]
        want_labels = util.preprocess_thd_engine(ids, use_fp8_padding=fp8, need_roll=True)[0]
        labelled = filled & ~torch.isin(rows, torch.tensor(lengths).cumsum(0))  # no last token
        assert labels[labelled].tolist() == want_labels[labelled].tolist() == (rows[labelled] + 1).tolist()
        assert not labels[~labelled].any()

        leaf = rows.float().requires_grad_()
        tokens = unpack(leaf, params, ids, len(lengths))
        assert lists(tokens) == lists(ids)
        (tokens.values() * ids.values()).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == leaf.tolist()  # d(token * number)/d(token): its number; 0 at padding

    compare()


def batch_of(lengths, **columns):
    batch = TensorDict({"input_ids": nested(lengths), **columns}, batch_size=[len(lengths)])
    batch["advantages"] = torch.arange(float(len(lengths)))
    batch.set_non_tensor("temperature", 0.5)
    return batch


def test_a_sent_batch_is_packed_unpacked_and_padded_without_reading_the_device(parallel, monkeypatch):
    """verl's function reads each length, which fails on the device "meta"."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    parallel()
    batch = batch_of([3, 2], prompts=nested([1, 1]), responses=nested([2, 1]))
    sent = packing.send_batch(batch, torch.device("meta"))
    ids = sent["input_ids"]
    assert sent["temperature"] == 0.5
    assert str(batch["input_ids"].device) == "cpu", "the batch itself stays where it was"
    assert (ids.device.type, sent["advantages"].device.type) == ("meta", "meta")
    assert (ids._get_min_seqlen(), ids._get_max_seqlen()) == (2, 3)
    rows, params, _ = pack(ids, use_fp8_padding=True)
    labels, _, _ = pack(ids.clone(), need_roll=True, use_fp8_padding=True)
    assert rows.shape == labels.shape == (1, 128)
    assert unpack(rows, params, ids, 2).values().shape == (5,)
    assert pad(torch.empty(5, device="meta"), sent).shape == (2, 2)
    with pytest.raises(Exception, match="meta"):
        verls.no_padding_2_padding(torch.empty(5, device="meta"), sent)


@settings(max_examples=60)
@given(some_lengths, st.data())
def test_rows_are_selected_as_verl_selects_them(lengths, data):
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6))
    batch = batch_of(lengths, experts=nested(lengths, width=(2, 3)))
    for indices in (rows, torch.tensor(rows)):
        got, want = select_rows(batch, indices), tu.index_select_tensor_dict(batch, indices)
        assert set(got.keys()) == set(want.keys())
        assert got.batch_size == want.batch_size == torch.Size([len(rows)])
        assert got["temperature"] == 0.5
        assert torch.equal(got["advantages"], want["advantages"])
        for name in ("input_ids", "experts"):
            assert lists(got[name]) == lists(want[name]) and got[name].dtype == want[name].dtype
            assert torch.equal(got[name].offsets(), want[name].offsets())


@pytest.mark.parametrize(("more", "width"), [({}, ()), ({"max_response_len": 40}, (3,))], ids=["longest", "fixed"])
def test_a_padded_output_and_its_gradient_equal_verls(width, more):
    @settings(max_examples=40)
    @given(some_rows)
    def compare(rows):
        prompts, responses = zip(*rows, strict=True)
        columns = {"prompts": nested(prompts), "responses": nested(responses)}
        batch, found = tu.get_tensordict(columns, {"dp_size": 1, **more}), []
        total = sum(prompts) + sum(responses)
        drawn = torch.Generator().manual_seed(total)
        values = torch.randn(total, *width, generator=drawn)
        weights = torch.randn(len(rows), more.get("max_response_len", max(responses)), *width, generator=drawn)
        for function in (verls.no_padding_2_padding, pad):
            leaf = values.clone().requires_grad_()
            padded = function(leaf, batch)
            (padded.sin() * weights).sum().backward()
            found.append((padded.detach(), leaf.grad))
        (want, want_gradient), (got, gradient) = found
        assert torch.equal(got, want)
        assert torch.equal(gradient, want_gradient)
        assert gradient.any()

    compare()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_outputs_of_micro_batches_come_back_in_order_as_verls_do(lengths, data):
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=2)))
    parts = [part for part in (order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)) if part]
    outputs = []
    for number, part in enumerate(parts):
        columns = {name: nested([lengths[row] for row in part]) + 100 * number for name in ("log_probs", "entropy")}
        outputs.append({"model_output": columns, "loss": float(number), "metrics": {"clip": number, "rows": part}})
    batch = tu.get_tensordict({"input_ids": nested(lengths)}, {"use_dynamic_bsz": True})
    want = verls_engine.postprocess_batch_func(output_lst=outputs, indices=parts, data=batch)
    got = join(output_lst=outputs, indices=parts, data=batch)
    assert (got["loss"], got["metrics"]) == (want["loss"], want["metrics"])
    assert list(got["model_output"]) == list(want["model_output"])
    for name, found in got["model_output"].items():
        expected = want["model_output"][name]
        assert torch.equal(found.values(), expected.values())
        assert torch.equal(found.offsets(), expected.offsets())
        assert packing.lengths_of(found) == tuple(lengths)
