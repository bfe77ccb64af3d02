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

from tests.parity.host_reads import reads  # noqa: E402

pack = packing.packed_by_index(util.preprocess_thd_engine)
unpack = packing.unpacked_by_index(util.postprocess_thd_engine)
select_rows = packing.selected_by_index(tu.index_select_tensor_dict)
pad = packing.padded_by_index(verls.no_padding_2_padding)
join = packing.joined_by_index(verls_engine.postprocess_batch_func)
some_rows = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=6)
some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def nested(lengths, *, width=()):
    """Sequences of the numbers from 1 on, each once; ``width``: further dimensions."""
    rows, start = [], 1
    for length in lengths:
        column = torch.arange(start, start + length)
        rows.append(column.view(-1, *(1 for _ in width)).expand(-1, *width).clone())
        start += length
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.fixture
def parallel(monkeypatch):
    """Set Megatron's parallel sizes: parallel(tp=, cp=)."""

    def set_to(*, tp=1, cp=1):
        for name, value in {
            "get_tensor_model_parallel_world_size": tp,
            "get_context_parallel_world_size": cp,
            "get_context_parallel_rank": 0,
            "get_context_parallel_group": None,
        }.items():
            monkeypatch.setattr(parallel_state, name, lambda value=value: value)

    return set_to


def test_packed_rows_labels_and_positions_are_verls_and_come_back_with_their_gradient(parallel):
    @settings(max_examples=60)
    @given(some_lengths, st.booleans(), st.sampled_from([1, 2, 3]))
    def compare(lengths, fp8, tp):
        ids = nested(lengths)
        parallel(tp=tp)
        rows, params, positions = pack(ids, use_fp8_padding=fp8)
        want_rows, want_params, want_positions = util.preprocess_thd_engine(ids, use_fp8_padding=fp8)
        assert rows.tolist() == want_rows.tolist()
        assert positions is not None and want_positions is not None
        assert positions[rows != 0].tolist() == want_positions[rows != 0].tolist()  # 0 is padding
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            got, want = getattr(params, name), getattr(want_params, name)
            assert (got.tolist(), got.dtype) == (want.tolist(), want.dtype)
        assert (params.max_seqlen_q, params.max_seqlen_kv) == (want_params.max_seqlen_q, want_params.max_seqlen_kv)

        labels = pack(ids, use_fp8_padding=fp8, need_roll=True)[0]
        want_labels = util.preprocess_thd_engine(ids, use_fp8_padding=fp8, need_roll=True)[0]
        last = torch.isin(rows, torch.tensor(lengths).cumsum(0))  # tokens are numbered from 1 on
        labelled = (rows != 0) & ~last
        assert torch.equal(labels[labelled], want_labels[labelled]) and torch.equal(
            labels[labelled], rows[labelled] + 1
        )
        assert not labels[~labelled].any()

        leaf = rows.float().requires_grad_()
        tokens = unpack(leaf, params, ids, len(lengths))
        assert [row.tolist() for row in tokens.unbind()] == [row.tolist() for row in ids.unbind()]
        (tokens.values() * ids.values()).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == leaf.tolist()  # d(token * number)/d(token): its number; 0 at padding

    compare()


def test_unusual_batches_are_left_to_verl(parallel):
    parallel(cp=2)
    ids = nested([8, 4])
    rows, params, _ = pack(ids)
    assert rows.tolist() == util.preprocess_thd_engine(ids)[0].tolist() and not hasattr(params, packing.LAYOUT)
    parallel()
    rows, params, _ = pack(nested([3, 2]), pad_to_length_bucket=8)
    assert rows.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert [row.tolist() for row in unpack(rows, params, nested([3, 2]), 2).unbind()] == [[1, 2, 3], [4, 5]]
    images = torch.nested.as_nested_tensor([torch.zeros(3, 5), torch.zeros(3, 2)], layout=torch.jagged)
    window = torch.nested.narrow(
        torch.arange(8).view(2, 4), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged
    )
    assert packing.is_jagged(ids)
    assert not packing.is_jagged(images), "its ragged dimension is the second of a sequence"
    assert not packing.is_jagged(window), "its sequences are not contiguous"
    columns = {"prompts": torch.ones(2, 2), "responses": torch.ones(2, 3)}
    batch = TensorDict({**columns, "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]])}, batch_size=2)
    assert pad(torch.arange(6.0), batch).tolist() == [[0, 1, 0], [4, 0, 0]]
    batch = tu.get_tensordict({"input_ids": nested([2, 1])}, {"use_dynamic_bsz": False})
    outputs = [{"model_output": {"log_probs": nested([length])}, "loss": 0.5, "metrics": {}} for length in (2, 1)]
    joined = join(output_lst=outputs, indices=None, data=batch)
    assert [row.tolist() for row in joined["model_output"]["log_probs"].unbind()] == [[1, 2], [1]]


def test_a_stage_without_the_embedding_keeps_the_tokens(parallel):
    parallel()
    ids = nested([3, 2])
    kept, params, positions = pack(ids, pre_process=False)
    assert kept is ids
    assert positions is None
    assert unpack(kept, params, ids, 2, post_process=False) is kept, "nor does one before the last unpack"
    assert params.cu_seqlens_q.tolist() == [0, 3, 5]


def batch_of(lengths):
    batch = TensorDict({"input_ids": nested(lengths), "loss_mask": nested(lengths)}, batch_size=[len(lengths)])
    batch["advantages"] = torch.arange(float(len(lengths)))
    batch.set_non_tensor("temperature", 0.5)
    return batch


def test_a_batch_that_is_sent_is_the_same_and_its_lengths_are_known(monkeypatch):
    """On the device "meta", whose values cannot be read."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    batch = batch_of([3, 2])
    sent = packing.send_batch(batch, torch.device("meta"))
    assert sent["temperature"] == 0.5
    assert str(batch["input_ids"].device) == "cpu", "the batch itself stays where it was"
    for name in ("input_ids", "loss_mask"):
        assert sent[name].device.type == "meta"
        assert packing.lengths_of(sent[name]) == (3, 2)
        assert (sent[name]._get_min_seqlen(), sent[name]._get_max_seqlen()) == (2, 3)
    assert sent["advantages"].device.type == "meta"


def test_a_sent_batch_is_packed_and_unpacked_without_reading_the_device(parallel, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    parallel()
    ids = packing.send_batch(batch_of([3, 2]), torch.device("meta"))["input_ids"]
    rows, params, _ = pack(ids, use_fp8_padding=True)
    assert rows.shape == (1, 128)
    labels, _, _ = pack(ids.clone(), need_roll=True, use_fp8_padding=True)
    assert labels.shape == (1, 128)
    assert unpack(rows, params, ids, 2).values().shape == (5,)


@settings(max_examples=60)
@given(some_lengths, st.data())
def test_rows_are_selected_as_verl_selects_them(lengths, data):
    row = st.integers(0, len(lengths) - 1)
    rows = data.draw(st.lists(row, min_size=1, max_size=6))
    batch = batch_of(lengths)
    batch["experts"] = nested(lengths, width=(2, 3))
    for indices in (rows, torch.tensor(rows)):
        got, want = select_rows(batch, indices), tu.index_select_tensor_dict(batch, indices)
        assert set(got.keys()) == set(want.keys())
        assert got.batch_size == want.batch_size == torch.Size([len(rows)])
        assert got["temperature"] == 0.5
        assert torch.equal(got["advantages"], want["advantages"])
        for name in ("input_ids", "loss_mask", "experts"):
            assert [each.tolist() for each in got[name].unbind()] == [each.tolist() for each in want[name].unbind()]
            assert torch.equal(got[name].offsets(), want[name].offsets())
            assert got[name].dtype == want[name].dtype


def responses_of(rows, **more):
    """A micro-batch of (prompt, response) lengths."""
    prompts, responses = zip(*rows, strict=True)
    columns = {"prompts": nested(prompts), "responses": nested(responses)}
    return tu.get_tensordict(columns, {"dp_size": 1, **more})


@pytest.mark.parametrize(("more", "width"), [({}, ()), ({"max_response_len": 40}, (3,))], ids=["longest", "fixed"])
def test_a_padded_output_and_its_gradient_equal_verls(width, more):
    @settings(max_examples=40)
    @given(some_rows)
    def compare(rows):
        total = sum(map(sum, rows))
        drawn = torch.Generator().manual_seed(total)
        batch, found = responses_of(rows, **more), []
        values = torch.randn(total, *width, generator=drawn)
        longest = more.get("max_response_len", max(response for _, response in rows))
        weights = torch.randn(len(rows), longest, *width, generator=drawn)
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


def test_padding_an_output_reads_nothing_from_the_device(monkeypatch):
    """verl's function reads each length, which fails on the device "meta"."""
    prompts, responses = ((2, 1), torch.tensor([0, 2, 3])), ((3, 1), torch.tensor([0, 3, 4]))
    columns = {
        name: packing.jagged(torch.arange(sum(lengths)), offsets, lengths)
        for name, (lengths, offsets) in {"prompts": prompts, "responses": responses}.items()
    }
    batch = tu.get_tensordict(columns, {})
    assert reads(lambda: pad(torch.arange(7.0), batch)) == "0 reads"
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    on_device = packing.send_batch(batch, torch.device("meta"))
    assert pad(torch.empty(7, device="meta"), on_device).shape == (2, 3)
    with pytest.raises(Exception, match="meta"):
        verls.no_padding_2_padding(torch.empty(7, device="meta"), on_device)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_outputs_of_micro_batches_come_back_in_order_as_verls_do(lengths, data):
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=2)))
    parts = [part for part in (order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)) if part]
    outputs = []
    for number, part in enumerate(parts):
        outputs_of_part = {
            name: nested([lengths[row] for row in part]) + 100 * number for name in ("log_probs", "entropy")
        }
        outputs.append(
            {"model_output": outputs_of_part, "loss": float(number), "metrics": {"clip": number, "rows": part}}
        )
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
