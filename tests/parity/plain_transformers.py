"""The parity tests' reference: transformers and torch, one process, float32, nothing packed."""

from pathlib import Path
from typing import Any

import torch

from tests.parity.megatron_ranks import batch


def plain_transformers(
    folder: str, lrs: list[float], aux: float = 0.0, export: Path | None = None
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: no packing, torch's AdamW, decay on matrices only.

    ``aux``: the coefficient of the whole batch's balancing loss, which is not part of ``loss``.
    ``export``: a folder for the trained model.
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
        loss, outputs = torch.zeros(()), []
        for ids, mask in rows:
            outputs.append(model(torch.tensor([ids]), output_router_logits=bool(aux)))
            logits = outputs[-1].logits[0, :-1]
            nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            loss = loss + (nats * torch.tensor(mask[1:])).sum() / trained
        (loss + aux * balancing_loss(outputs) if aux else loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm))
    if export is not None:
        model.save_pretrained(export)
    return steps


def of_layers(outputs: list[Any]) -> list[torch.Tensor]:
    """Of each layer the logits [T, E] of its router, over all sequences."""
    return [torch.cat(layer) for layer in zip(*(output.router_logits for output in outputs), strict=True)]


def choices(logits_TE: torch.Tensor) -> torch.Tensor:
    """[E] how often a router has chosen each expert, two for each token."""
    return torch.bincount(logits_TE.topk(2).indices.flatten(), minlength=logits_TE.shape[1]).float()


def balancing_loss(outputs: list[Any]) -> torch.Tensor:
    """Switch Transformer's, of each layer: E * sum over experts of (share of the choices) * (mean
    probability).
    """
    total = torch.zeros(())
    for logits_TE in of_layers(outputs):
        share_E = choices(logits_TE) / (2 * len(logits_TE))
        total = total + logits_TE.shape[1] * (share_E * logits_TE.softmax(-1).mean(0)).sum()
    return total
