"""Counts reads of tensors, each of which would make the host wait for a device."""

from collections import Counter
from unittest import mock


def known_tokens():
    """Two sequences whose lengths the host knows."""
    import torch

    from retool_mcore.platforms.patches_verl import jagged

    return jagged(torch.arange(5), torch.tensor([0, 3, 5]), (3, 2))


def reads(call) -> str:
    """How often ``call`` reads a tensor's numbers, for which the host would wait for a device."""
    import torch
    from megatron.core import parallel_state

    names = [f"get_{kind}_parallel_{what}" for kind in ("tensor_model", "context") for what in ("world_size", "rank")]
    ones = {name: lambda name=name: int(name.endswith("size")) for name in names}
    count = Counter[str]()

    def counted(original):
        def read(tensor):
            count["read"] += 1
            return original(tensor)

        return read

    readers = {name: counted(getattr(torch.Tensor, name)) for name in ("tolist", "item")}
    with mock.patch.multiple(parallel_state, **ones), mock.patch.multiple(torch.Tensor, **readers):
        call()
    return f"{count['read']} reads"


def rows_of_a_batch(_) -> str:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    batch = TensorDict({"input_ids": known_tokens()}, batch_size=[2])
    return reads(lambda: tu.index_select_tensor_dict(batch, [1]))


def output_in_the_shape_of_a_loss(_) -> str:
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils import losses

    batch = tu.get_tensordict({"prompts": known_tokens(), "responses": known_tokens()}, {})
    pad = losses.no_padding_2_padding  # pyright: ignore[reportPrivateImportUsage]  patched there
    return reads(lambda: pad(torch.arange(10.0), batch))


def outputs_of_micro_batches(_) -> str:
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.megatron import transformer_impl

    batch = tu.get_tensordict({"input_ids": known_tokens()}, {"use_dynamic_bsz": True})
    outputs = [{"model_output": {"log_probs": known_tokens()}}, {"model_output": {"log_probs": known_tokens()}}]
    join = transformer_impl.postprocess_batch_func  # pyright: ignore[reportPrivateImportUsage]  patched there
    return reads(lambda: join(output_lst=outputs, indices=[[0, 2], [1, 3]], data=batch))


PROBES = {
    "verl.utils.tensordict_utils.index_select_tensor_dict": rows_of_a_batch,
    "verl.workers.utils.losses.no_padding_2_padding": output_in_the_shape_of_a_loss,
    "verl.workers.engine.megatron.transformer_impl.postprocess_batch_func": outputs_of_micro_batches,
}
