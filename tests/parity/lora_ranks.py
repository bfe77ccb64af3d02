"""What a job with adapters does beyond one without: see megatron_ranks."""

from typing import Any

from tests.parity.megatron_ranks import Engine


def adapters(
    rank: int = 4, *matrices: str, alpha: int = 8, dropout: float = 0.0, base: str = "model"
) -> dict[str, Any]:
    """verl's keys, as verl/keys/engine.py makes them of [lora]."""
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    lora = {"merge": True, "dropout": dropout, "base_precision": base}
    return {"lora_rank": rank, "lora_alpha": alpha, "target_modules": list(matrices or every), "lora": lora}


class LoraEngine(Engine):
    def base_logprobs(self, sequences: list[list[int]]) -> list[list[float]] | None:
        """As ``logprobs``, by the way on which verl's trainer asks for the reference."""
        return self.logprobs(sequences, no_lora_adapter=True)

    def held(self) -> dict[str, Any]:
        """Numbers of elements: trained, in buffers of gradients, and in the optimizer."""
        chunks = self.engine.module
        parameters = [each for chunk in chunks for each in chunk.parameters()]
        trained = [each for each in parameters if each.requires_grad]
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        found: dict[str, Any] = {
            "all": sum(each.numel() for each in parameters),
            "trained": sum(each.numel() for each in trained),
            "in_buffers": sum(each.numel() for buffer in buffers for each in buffer.params),
            "with_main_grad": sum(each.numel() for each in parameters if hasattr(each, "main_grad")),
            "with_grad": sum(each.numel() for each in parameters if each.grad is not None),
            "main": 0,
            "moments": 0,
        }
        optimizer = self.engine.optimizer
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for group in part.optimizer.param_groups:
                for each in group["params"]:
                    found["main"] += each.numel()
                    found["moments"] += sum(
                        value.numel() for name, value in part.optimizer.state[each].items() if name.startswith("exp")
                    )
        return found

    def frozen_bytes(self) -> dict[str, int]:
        """Of the storages of the frozen matrices in layers, and of all other weights."""
        found = {"matrices": 0, "others": 0}
        for chunk in self.engine.module:
            for name, each in chunk.named_parameters():
                if not each.requires_grad:
                    matrix = ".linear_" in name and name.endswith(".weight") and "layer_norm" not in name
                    found["matrices" if matrix else "others"] += each.untyped_storage().nbytes()
        return found

    def save_adapter(self, folder: str) -> None:
        if job := self.engine.adapters.staged(folder):
            job()

    def initial(self) -> dict[str, float]:
        """Of each adapter before any step: B's largest number."""
        from retool_mcore.platforms.lora import gather

        return {name: float(B.abs().max()) for name, (_, B) in gather(self.engine.module).items()}
