"""The padding of platforms/patches_verl.py against what it replaces: loops over responses."""

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
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.engine import utils as verls_engine  # noqa: E402
from verl.workers.utils import padding as verls  # noqa: E402

from tests.parity.host_reads import reads  # noqa: E402
from tests.unit.platforms.test_packing import nested  # noqa: E402

pad = packing.padded_by_index(verls.no_padding_2_padding)
join = packing.joined_by_index(verls_engine.postprocess_batch_func)
some_rows = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=6)


def batch_of(rows, **told):
    """A micro-batch of (prompt, response) lengths."""
    prompts, responses = zip(*rows, strict=True)
    columns = {"prompts": nested(prompts), "responses": nested(responses)}
    return tu.get_tensordict(columns, {"dp_size": 1, **told})


@pytest.mark.parametrize("told", [{}, {"max_response_len": 40}], ids=["longest", "as told"])
@pytest.mark.parametrize("width", [(), (3,)], ids=["one number", "three numbers"])
def test_a_padded_output_and_its_gradient_are_verls_to_the_bit(width, told):
    @settings(max_examples=40)
    @given(some_rows)
    def compare(rows):
        total = sum(map(sum, rows))
        drawn = torch.Generator().manual_seed(total)
        batch, found = batch_of(rows, **told), []
        values = torch.randn(total, *width, generator=drawn)
        longest = told.get("max_response_len", max(response for _, response in rows))
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


def test_a_nested_output_is_taken_too():
    batch = batch_of([(2, 3), (1, 1)])
    output = nested([5, 2]).float()
    assert pad(output, batch).tolist() == [[2, 3, 4], [6, 0, 0]]


def test_padding_an_output_reads_nothing_from_the_device(monkeypatch):
    """verl's reads each length of each response; here a batch on "meta" has numbers to nobody."""
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


def test_an_output_of_other_sequences_is_refused():
    with pytest.raises(AssertionError, match="as many tokens"):
        pad(torch.arange(6.0), batch_of([(2, 3), (1, 1)]))
    with pytest.raises(AssertionError, match="prompt's last"):
        pad(torch.arange(4.0), tu.get_tensordict({"prompts": nested([0, 1]), "responses": nested([2, 1])}, {}))


def test_a_padded_batch_is_left_to_verl():
    columns = {"prompts": torch.ones(2, 2), "responses": torch.ones(2, 3)}
    batch = TensorDict({**columns, "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]])}, batch_size=2)
    assert pad(torch.arange(6.0), batch).tolist() == [[0, 1, 0], [4, 0, 0]]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_outputs_of_micro_batches_come_back_in_order_as_verls_do(lengths, data):
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=2)))
    parts = [part for part in (order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)) if part]
    outputs = []
    for number, part in enumerate(parts):
        said = {name: nested([lengths[row] for row in part]) + 100 * number for name in ("log_probs", "entropy")}
        outputs.append({"model_output": said, "loss": float(number), "metrics": {"clip": number, "rows": part}})
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


def test_a_batch_in_equal_parts_and_a_stage_without_output_are_verls():
    batch = tu.get_tensordict({"input_ids": nested([2, 1])}, {"use_dynamic_bsz": False})
    outputs = [{"model_output": {"log_probs": nested([length])}, "loss": 0.5, "metrics": {}} for length in (2, 1)]
    told = join(output_lst=outputs, indices=None, data=batch)
    assert [row.tolist() for row in told["model_output"]["log_probs"].unbind()] == [[1, 2], [1]]
    assert join(output_lst=[], indices=[], data=batch)["model_output"] == {}
