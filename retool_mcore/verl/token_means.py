"""Token-weighted means of the metrics that verl's losses report.

verl's losses report means over the tokens of a micro-batch, and its workers average these means. A
token of a short micro-batch would then weigh more than one of a long micro-batch, and the metric
would depend on how responses are packed. Here a micro-batch reports sums, which the step divides by
its number of tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric

LOSS_TOKENS = "loss_tokens"
ACTOR_MEANS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/entropy")
_SUM = "sum_over_tokens/"
_OF_ENGINES = "rollout_corr/"  # verl/measure.py computes these once per step, over all rows
_REJECTED = "rollout_corr/rollout_rs_masked_fraction"
_CONSTANTS = ("kl_coef",)


def sum_over_tokens(loss_function: Callable[..., Any], *, data: TensorDict, **rest: Any) -> tuple[Any, dict[str, Any]]:
    """Compute verl's loss of a micro-batch, and turn each mean among its metrics into a sum.

    Adds LOSS_TOKENS, the number of tokens in the loss minus those that the loss rejected.
    """
    loss, metrics = loss_function(data=data, **rest)
    if not metrics:  # SFT's loss reports none
        return loss, metrics
    rejected = metrics[_REJECTED].aggregate() if _REJECTED in metrics else 0.0
    tokens = round(float(data["response_mask"].values().sum()) * (1 - rejected)) * data["dp_size"]
    told: dict[str, Any] = {LOSS_TOKENS: _sum(tokens)}
    for name, metric in metrics.items():
        if name in _CONSTANTS or (isinstance(metric, Metric) and metric.aggregation != AggregationType.MEAN):
            told[name] = metric
        elif not name.startswith(_OF_ENGINES):
            told[_SUM + name] = _sum(tokens * (metric.aggregate() if isinstance(metric, Metric) else metric))
    return loss, told


def _sum(value: float) -> Metric:
    """A metric that verl sums over micro-batches and averages over data-parallel ranks."""
    return Metric(AggregationType.SUM, float(value))


def divide_by_tokens(metrics: dict[str, Any]) -> None:
    """Replace the sums of a step's updates by means, in place. ``metrics``: name -> [updates]."""
    if LOSS_TOKENS not in metrics:
        return
    tokens = sum(metrics[LOSS_TOKENS])
    metrics[LOSS_TOKENS] = [tokens]
    for name in [name for name in metrics if name.startswith(_SUM)]:
        metrics[name.removeprefix(_SUM)] = [sum(metrics.pop(name)) / max(tokens, 1)]


def mean_of_updates(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Token-weighted means of the actor's metrics over ``updates``, one mapping per worker call."""
    weights = [update.get(f"actor/{LOSS_TOKENS}", 0.0) for update in updates]
    tokens = sum(weights)
    means = {
        name: sum(update[name] * weight for update, weight in zip(updates, weights, strict=True)) / tokens
        for name in ACTOR_MEANS
        if tokens and all(name in update for update in updates)
    }
    return means | ({f"actor/{LOSS_TOKENS}": tokens} if tokens else {})
