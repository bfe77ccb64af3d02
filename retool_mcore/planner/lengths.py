"""Sequence lengths of a run, assumed from its configuration or measured in another run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean

from retool_mcore.config import Memory, Parallel, RlConfig, SftConfig, load_run
from retool_mcore.config.shared import CONFIG_FILE
from retool_mcore.errors import ConfigError
from retool_mcore.model.shape import ModelShape, layers_to_recompute, token_memory
from retool_mcore.planner.data_lengths import FileLengths
from retool_mcore.run.metrics import read_metrics

SAMPLES = 64  # quantiles that represent a run's length distribution
PROMPT, RESPONSE, ROW = 0.25, 0.4, 0.25  # assumed mean lengths, as shares of the maximum
NEEDED = {"prompt_length/mean", "response_length/min", "response_length/mean", "response_length/max"}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The distribution of a run's sequence lengths, in tokens. An SFT row counts as a response.

    Response lengths follow a power law from ``shortest`` to ``longest`` with the mean ``mean``:
    uniform if the mean is halfway, with few long responses if it is lower.
    """

    shortest: float
    mean: float
    longest: float
    prompt: float = 0.0  # mean prompt length
    limit: float  # length of the longest response in each engine
    sampled: float = 1.0  # share of response tokens that the model sampled; the rest is tool output
    calls: float | None = None  # tool calls per response; None if unknown
    tool_s: float | None = None  # seconds per response spent waiting for calls; None if unknown
    note: str = ""  # the source of the lengths; "" if the user gave the mean

    @staticmethod
    def evenly(mean: float, limit: float, prompt: float = 0.0, note: str = "") -> "Lengths":
        """A uniform distribution around ``mean``, as wide as the bounds 0 and ``limit`` allow."""
        high = max(mean, min(limit, 2 * mean))
        return Lengths(
            shortest=2 * mean - high, mean=mean, longest=high, prompt=prompt, limit=max(limit, high), note=note
        )

    @property
    def sequence(self) -> float:
        return self.prompt + self.mean

    @property
    def _power(self) -> float:
        return (self.longest - self.shortest) / (self.mean - self.shortest) - 1 if self.mean > self.shortest else 1.0

    def quantiles(self, count: int) -> list[float]:
        """``count`` quantiles of the response length, in ascending order."""
        rise = self.longest - self.shortest
        return [self.shortest + rise * ((number + 0.5) / count) ** self._power for number in range(count)]

    @property
    def _squares(self) -> float:
        """The mean square of the response lengths."""
        low, rise, power = self.shortest, self.longest - self.shortest, self._power
        return low**2 + 2 * low * rise / (power + 1) + rise**2 / (2 * power + 1)

    @property
    def spread(self) -> float:
        """The mean square of the sequence lengths divided by the square of their mean."""
        return (self.prompt**2 + 2 * self.prompt * self.mean + self._squares) / self.sequence**2

    @property
    def context(self) -> float:
        """The mean context length in tokens over the responses that run at the same time."""
        return self.prompt + self._squares / (2 * self.mean)

    def recomputed(self, shape: ModelShape, parallel: Parallel, memory: Memory, micro_batch_tokens: int) -> float:
        """The share of forward computation that ``memory.recompute = "auto"`` repeats.

        A sequence longer than the micro-batch budget gets its own micro-batch. Shorter sequences
        are packed up to the budget and keep all activations.
        """
        layers = ceil(shape.layers / parallel.pp)
        other_memory, input_share = token_memory(shape, fused_cross_entropy=memory.fused_cross_entropy)
        lengths = [self.prompt + response for response in self.quantiles(SAMPLES)]
        twice = 0.0
        for length in lengths:
            tokens = ceil(length / parallel.cp)
            wanted = layers_to_recompute(
                tokens, micro_batch_tokens, layers, other_memory=other_memory, input_share=input_share
            )
            twice += length * min(wanted, layers) / layers
        return twice / sum(lengths)


def assumed(config: SftConfig | RlConfig, mean_tokens: float | None, data: FileLengths | None = None) -> Lengths:
    """Assume lengths from the limits in ``config``.

    ``mean_tokens``: the known mean of whole sequences, or None. ``data``: lengths in the data file.
    """
    if isinstance(config, RlConfig):
        return _assumed_of_rl(config, mean_tokens, data)
    limit = config.max_sequence_tokens
    if data is not None and not mean_tokens:
        mean, longest = min(data.mean, limit), min(data.longest, limit)  # training drops longer rows
        return Lengths(shortest=data.shortest, mean=mean, longest=longest, limit=longest, note=data.note)
    mean = mean_tokens or ROW * limit
    return Lengths.evenly(mean, limit, note=_note(mean_tokens, mean, f"{ROW:.0%} of data.max_length_tokens"))


def _assumed_of_rl(config: RlConfig, mean_tokens: float | None, data: FileLengths | None) -> Lengths:
    prompt = PROMPT * config.data.max_prompt_tokens if data is None else data.mean
    if data is None and mean_tokens:
        prompt = min(prompt, mean_tokens / 2)  # the known mean may be smaller than the assumed prompt
    longest = config.rollout.max_response_tokens
    mean = mean_tokens or prompt + RESPONSE * longest
    rule = f"{RESPONSE:.0%} of the longest response"
    rule = rule if data is not None else f"{PROMPT:.0%} of the longest prompt and {rule}"
    notes = [data.note if data is not None else "", _note(mean_tokens, mean, rule)]
    return Lengths.evenly(max(1.0, mean - prompt), longest, prompt, "; ".join(note for note in notes if note))


def _note(mean_tokens: float | None, mean: float, rule: str) -> str:
    return (
        "" if mean_tokens else f"a mean of {mean:,.0f} tokens is assumed, {rule}; set it with --like or --mean-tokens"
    )


def lengths_of_run_dir(path: Path, config: SftConfig | RlConfig) -> Lengths:
    """The lengths of the run in ``path``, averaged over its steps. Raises ConfigError."""
    file = path / "metrics.jsonl"
    rows = [row for row in read_metrics(file) if row["step"]] if file.is_file() else []  # step 0 is only a validation
    if not rows:
        raise ConfigError(f"--like {path} has no metrics.jsonl with a step. Give the folder of a run with steps.")
    note = f"lengths are from {path}, averaged over its {len(rows)} steps"
    if isinstance(config, RlConfig):
        return lengths_of_rows(rows, note)
    other = load_run(str(path / CONFIG_FILE))
    if not isinstance(other, SftConfig):
        raise ConfigError(f"--like {path} is an RL run, but {config.source} is SFT. Give a run of the same kind.")
    mean = _mean(rows, "perf/total_num_tokens") / other.train.global_batch
    return Lengths.evenly(mean, config.max_sequence_tokens, note=note)


def lengths_of_rows(rows: Sequence[Mapping[str, float]], note: str = "") -> Lengths:
    """The lengths from the metrics of RL steps. Raises ConfigError if the metrics lack them."""
    if not any(row.keys() >= NEEDED for row in rows):
        raise ConfigError(f"{note}, but the steps lack {min(NEEDED)}, an RL metric. Give an RL run.")
    mean, longest = _mean(rows, "response_length/mean"), _mean(rows, "response_length/max")
    steps = [row for row in rows if "behavior/model_tokens" in row]
    return Lengths(
        shortest=_mean(rows, "response_length/min"), mean=mean, longest=longest, limit=longest,
        prompt=_mean(rows, "prompt_length/mean"), note=note,
        sampled=_mean(steps, "behavior/model_tokens") / _mean(steps, "response_length/mean") if steps else 1.0,
        calls=_mean(steps, "behavior/calls") if steps else None,
        tool_s=_mean(steps, "behavior/tool_s") if steps else None,
    )  # fmt: skip


def _mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return fmean(row[key] for row in rows if key in row)
