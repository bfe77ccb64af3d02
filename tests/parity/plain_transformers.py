"""The parity tests' reference: transformers and torch, one process, float32, nothing packed."""

import torch

from tests.parity.megatron_ranks import batch


def plain_transformers(folder: str, lrs: list[float]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: one sequence at a time, no packing, torch's AdamW, decay
    on matrices only.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    steps = []
    for step, lr in enumerate(lrs, start=1):
        rows = batch(step)
        trained = sum(sum(mask) for _, mask in rows)
        total = 0.0
        for ids, mask in rows:
            logits = model(torch.tensor([ids])).logits[0, :-1]
            nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            loss = (nats * torch.tensor(mask[1:])).sum() / trained
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total, norm))
    return steps
