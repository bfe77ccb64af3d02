"""RL's updates in the ranks of megatron_ranks: verl's losses of actor and critic."""

import random
from functools import partial
from typing import Any

PROMPT_TOKENS = 6
VOCAB = 260
LOADS = ("experts/load_max_over_mean", "experts/unused")
# Responses of each of two mini-batches of eight. In the second, one is longer than all others.
LENGTHS = ([9, 14, 20, 26, 31, 37, 42, 44], [8, 12, 15, 20, 24, 28, 33, 84])


class RlEngine:
    """One rank of a worker whose ``role`` is "actor" or "critic". Methods are the actions of a job.

    ``auto``: with RecomputingWorker, else with the worker below it. ``settings``: of a run file, by
    which the actor's loss is then made. ``run_file``: such settings again, by which the whole actor
    is made.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.critic = job["role"] == "critic"
        self.worker = actor_of_run(job) if "run_file" in job else worker_with_loss(job)
        self.engine = self.worker.engine
        self.seen = watched(self.engine)

    def update(self, masked: int | None = None, size_of_update: int = 8) -> dict[str, Any] | None:
        """Two mini-batches, one update each or more, and the model's outputs of all rows before and
        after them. Of mini-batch ``masked`` no token is in the loss.

        "during": log-probabilities of the rows from each update's own pass. "seen": of each forward
        pass in training, its tokens and recomputed layers; of each data-parallel rank. "states":
        bytes reserved for Adam's states before the first update, their bytes after it, and whether
        a reservation remains.
        """
        import torch.distributed as dist
        from verl.utils import tensordict_utils as tu

        from retool_mcore.verl.update_worker import KEEP_LOG_PROBS

        rank, size = self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        data = rows(rank, size, masked)
        tu.assign_non_tensor_data(data, KEEP_LOG_PROBS, not self.critic)
        before = self._outputs(rows(rank, size))
        held = 0 if self.worker._reserved is None else self.worker._reserved.nbytes
        metrics = self.learn(data, size_of_update)
        states = [held, self._bytes_of_states(), int(self.worker._reserved is not None)]
        after = self._outputs(rows(rank, size))
        seen: list[Any] = [None] * size
        dist.all_gather_object(seen, self.seen, group=self.engine.get_data_parallel_group())
        if metrics is None:
            return None
        return {
            "seen": seen,
            "states": states,
            "load": {name: values for name, values in metrics.items() if name.startswith("experts/")},
            "grad_norm": [float(norm) for norm in metrics["grad_norm"]],
            "loss": [float(loss) for loss in metrics["loss"]],
            "before": before,
            "during": [row.tolist() for update in self.worker.log_probs for row in update.unbind()],
            "after": after,
        }

    def learn(self, data: Any, size_of_update: int = 8) -> Any:
        """A step of the two mini-batches: verl's metrics, None on ranks without the output."""
        from verl.utils import tensordict_utils as tu

        sizes = {"mini_batch_size": size_of_update, "global_batch_size": size_of_update}
        tu.assign_non_tensor(data, **sizes, epochs=1, seed=0, dataloader_kwargs={})
        output = self.worker.train_mini_batch(data)
        return tu.get(output, "metrics") if self.engine.is_mp_src_rank_with_outputs() else None

    def replayed(self) -> list[list[float]] | None:
        """The log-probabilities of this rank's rows, with the experts of ``routes``."""
        return self._outputs(self._rows_with("replayed")) or None

    def noted(self) -> list[list[list[list[int]]]] | None:
        """The experts [T, L, K] of this rank's rows, as a pass with "R2" notes them."""
        from verl.utils import tensordict_utils as tu

        data = self._rows_with("own")
        tu.assign_non_tensor_data(data, "enable_routing_replay", True)
        tu.assign_non_tensor(data, compute_loss=False)
        output: Any = self.worker.infer_batch(data)
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        self.noted_experts = output["routed_experts"].unbind()
        return [each.long().sort().values.tolist() for each in self.noted_experts]

    def step(self, experts: str) -> dict[str, list[float]] | None:
        """Of a step with "own", "replayed" or "noted" experts: the losses and the load."""
        metrics = self.learn(self._rows_with(experts))
        return metrics and {name: [float(each) for each in metrics[name]] for name in (*LOADS, "loss")}

    def _rows_with(self, experts: str) -> Any:
        import torch
        from verl.utils import tensordict_utils as tu

        data = rows(self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size())
        if experts != "own":
            lengths = data["input_ids"].offsets().diff()
            chosen = self.noted_experts if experts == "noted" else [torch.tensor(routes(each)) for each in lengths]
            columns = [each.to(torch.int16) for each in chosen]
            data["routed_experts"] = torch.nested.as_nested_tensor(columns, layout=torch.jagged)
            tu.assign_non_tensor_data(data, "enable_routing_replay", True)
        return data

    def save(self, folder: str) -> list[list[float]] | None:
        """Save, and return the model's outputs of all rows."""
        from retool_mcore.verl.checkpoint import save

        save(self.engine, folder, step=0)
        return self._outputs(rows(0, 1)) or None

    def load(self, folder: str) -> list[list[float]] | None:
        """Load a checkpoint, and return the model's outputs of all rows."""
        from retool_mcore.verl.checkpoint import load_checkpoint

        load_checkpoint(self.engine, folder)
        return self._outputs(rows(0, 1)) or None

    def _bytes_of_states(self) -> int:
        optimizer = self.engine.optimizer
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        states = [state for part in parts for state in part.optimizer.state.values()]
        return sum(tensor.nbytes for state in states for name, tensor in state.items() if name != "step")

    def _outputs(self, data: Any) -> list[list[float]]:
        """The values or log-probabilities of each row; of no row on ranks without the output."""
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(data, compute_loss=False)
        output: Any = self.worker.infer_batch(data)
        if not self.engine.is_mp_src_rank_with_outputs():
            return []
        return [row.tolist() for row in output["values" if self.critic else "log_probs"].unbind()]


def watched(engine: Any) -> list[tuple[int, int]]:
    """Of each forward pass in training from now on: its tokens, and the layers it recomputes."""
    seen: list[tuple[int, int]] = []

    def look(block: Any, args: Any, kwargs: Any) -> None:
        config = block.config
        hidden_T1H = kwargs.get("hidden_states", args[0] if args else None) if block.pre_process else block.input_tensor
        tokens = hidden_T1H.shape[0] * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        if block.training:
            seen.append((tokens, config.recompute_num_layers if config.recompute_granularity == "full" else 0))

    for wrapped in engine.module:
        chunk = wrapped
        while not hasattr(chunk, "decoder"):
            chunk = chunk.module
        chunk.decoder.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def worker_with_loss(job: dict[str, Any]) -> Any:
    from verl.workers.config import McoreActorConfig, McoreCriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    from retool_mcore.verl.update_worker import RecomputingWorker, UpdateWorker
    from tests.parity.megatron_ranks import worker_config

    worker = (RecomputingWorker if job["auto"] else UpdateWorker)(worker_config(job))
    worker.reset()
    dynamic = {"use_dynamic_bsz": True, "rollout_n": 1}
    if job["role"] == "critic":
        loss = partial(value_loss, config=McoreCriticConfig(ppo_micro_batch_size_per_gpu=1, **dynamic))
    elif "settings" in job:
        from tests.unit.verl.loss_scenario import actor_config

        loss = partial(ppo_loss, config=actor_config(*job["settings"]))
    else:
        loss = partial(ppo_loss, config=McoreActorConfig(loss_agg_mode="token-mean", **dynamic))
    worker.set_loss_fn(loss)
    return worker


def actor_of_run(job: dict[str, Any]) -> Any:
    """The actor of a run on the job's model, as its Ray worker makes it, with its loss."""
    from omegaconf import OmegaConf
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from retool_mcore.config import RlConfig, load_config
    from retool_mcore.platforms import get_platform
    from retool_mcore.verl.keys.tree import ppo_tree
    from retool_mcore.verl.workers import worker_class
    from tests.unit.verl.loss_scenario import RL

    config = load_config(RlConfig, RL, [f"model.path={job['model']}", *job["run_file"]])
    tree = OmegaConf.create(OmegaConf.to_container(ppo_tree(config, get_platform("cpu")), resolve=True))
    worker = worker_class(ActorRolloutRefWorker, config.memory)(config=tree.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker.actor


def rows(rank: int, size: int, masked: int | None = None) -> Any:
    """This rank's share of both mini-batches. The masks of mini-batch ``masked`` are zeros."""
    import torch
    from tensordict.tensorclass import NonTensorData
    from verl.utils import tensordict_utils as tu

    columns: dict[str, list[torch.Tensor]] = {}
    for mini_batch, lengths in enumerate(LENGTHS):
        for number in range(rank, len(lengths), size):
            for name, column in row(100 * mini_batch + number, lengths[number]).items():
                zeros = name.endswith("_mask") and mini_batch == masked
                columns.setdefault(name, []).append(torch.tensor([0] * len(column) if zeros else column))
    nested = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
    data = tu.get_tensordict(nested, {"temperature": 1.0, "pad_token_id": 0})
    tu.assign_non_tensor(data, global_token_num=NonTensorData([len(ids) for ids in columns["input_ids"]]))
    return data


def routes(tokens: int, layers: int = 4) -> list[list[list[int]]]:
    """Experts [T, L, 2] of a sequence that no router chose: one of each layer has all tokens."""
    return [[[(3 + layer) % 4, (layer + token * token % 7 % 3) % 4] for layer in range(layers)]
            for token in range(tokens)]  # fmt: skip


def row(seed: int, length: int) -> dict[str, list[Any]]:
    draw = random.Random(seed)
    prompt = [draw.randrange(2, VOCAB) for _ in range(PROMPT_TOKENS)]
    response = [draw.randrange(2, VOCAB) for _ in range(length)]
    mask = [int(draw.random() < 0.8) for _ in response]
    floats = {"old_log_probs": [draw.uniform(-7.0, -4.0) for _ in response]}
    for name in ("advantages", "values", "returns"):
        floats[name] = [draw.uniform(-1.0, 1.0) for _ in response]
    return {
        "prompts": prompt,
        "responses": response,
        "input_ids": prompt + response,
        "position_ids": list(range(len(prompt) + length)),
        "response_mask": mask,
        "loss_mask": [0] * len(prompt) + mask,
        **floats,
    }
