"""How long a run's sequences are: assumed from its configuration, or as another run had them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean

from retool_mcore.config import Memory, Parallel, RlConfig, SftConfig, load_run
from retool_mcore.errors import ConfigError
from retool_mcore.model.activations import layers_to_recompute, token_memory
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.data_lengths import InFile
from retool_mcore.run.metrics import read_metrics

SAMPLES = 64  # lengths that stand for all lengths of a run
FINISHED = 0.95  # of the responses, for their median to be that of all
NEEDED = {"prompt_length/mean", "response_length/min", "response_length/mean", "response_length/max"}


@dataclass(frozen=True)
class _Part:
    """A share of the responses, from its shortest to its longest by a power law."""

    share: float
    low: float
    mean: float
    high: float

    @property
    def _power(self) -> float:
        return (self.high - self.low) / (self.mean - self.low) - 1 if self.mean > self.low else 1.0

    def at(self, share: float) -> float:
        return self.low + (self.high - self.low) * share**self._power

    @property
    def squares(self) -> float:
        low, rise, power = self.low, self.high - self.low, self._power
        return low**2 + 2 * low * rise / (power + 1) + rise**2 / (2 * power + 1)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a run's sequences. Those of SFT are all response.

    Responses rise from the shortest to the longest by a power law whose mean is ``mean``: evenly
    where the mean is in the middle, with few long ones where it is lower. Where the median is known
    they rise evenly to it, and the upper half by that law.
    """

    shortest: float
    mean: float
    longest: float
    median: float | None = None
    prompt: float = 0.0  # mean
    limit: float  # one response in each engine is so long
    sampled: float = 1.0  # share of a response that the model sampled; tools wrote the rest
    calls: float | None = None  # of a response; None: not known
    tool_s: float | None = None  # that a response waits for its calls
    note: str = ""  # where they come from; "" where the user said it

    @staticmethod
    def evenly(mean: float, limit: float, prompt: float = 0.0, note: str = "") -> Lengths:
        """Around ``mean``, up to ``limit`` or down to nothing, whichever is nearer to it."""
        high = max(mean, min(limit, 2 * mean))
        return Lengths(
            shortest=2 * mean - high, mean=mean, longest=high, prompt=prompt, limit=max(limit, high), note=note
        )

    @property
    def sequence(self) -> float:
        return self.prompt + self.mean

    @property
    def _parts(self) -> list[_Part]:
        if self.median is None:
            return [_Part(1.0, self.shortest, self.mean, self.longest)]
        lower = (self.shortest + self.median) / 2
        upper = _Part(0.5, self.median, 2 * self.mean - lower, self.longest)
        return [_Part(0.5, self.shortest, lower, self.median), upper]

    def quantiles(self, count: int) -> list[float]:
        """``count`` responses of a step, shortest first."""
        parts = self._parts
        found = list[float]()
        for number in range(count):
            share = (number + 0.5) / count
            part = parts[share >= parts[0].share] if len(parts) > 1 else parts[0]
            found.append(part.at((share - (0.0 if part is parts[0] else parts[0].share)) / part.share))
        return found

    @property
    def _squares(self) -> float:
        """The mean square of the responses."""
        return sum(part.share * part.squares for part in self._parts)

    @property
    def spread(self) -> float:
        """The mean square of the sequences' lengths over the square of their mean."""
        squares = self.prompt**2 + 2 * self.prompt * self.mean + self._squares
        return squares / self.sequence**2

    @property
    def context(self) -> float:
        """Tokens before the one that a response samples, on average over all that run at a time."""
        return self.prompt + self._squares / (2 * self.mean)

    def recomputed(self, shape: ModelShape, parallel: Parallel, memory: Memory, micro_batch_tokens: int) -> float:
        """Share of all layers' forward work that ``memory.recompute = "auto"`` does twice.

        A sequence above the budget of a micro-batch has one to itself. Shorter sequences are packed
        up to the budget and keep all activations.
        """
        layers = ceil(shape.layers / parallel.pp)
        rest, input_share = token_memory(shape, fused_cross_entropy=memory.fused_cross_entropy)
        lengths = [self.prompt + response for response in self.quantiles(SAMPLES)]
        twice = 0.0
        for length in lengths:
            tokens = ceil(length / parallel.cp)
            wanted = layers_to_recompute(tokens, micro_batch_tokens, layers, rest=rest, input_share=input_share)
            twice += length * min(wanted, layers) / layers
        return twice / sum(lengths)


def assumed(config: SftConfig | RlConfig, mean_tokens: float | None, data: InFile | None = None) -> Lengths:
    """Lengths of which at most the mean is known, prompts included, and what ``data`` holds."""
    if isinstance(config, RlConfig):
        return _assumed_of_rl(config, mean_tokens, data)
    limit = config.max_sequence_tokens
    if data is not None and not mean_tokens:
        mean, longest = min(data.mean, limit), min(data.longest, limit)  # longer rows are left out
        return Lengths(shortest=data.shortest, mean=mean, longest=longest, limit=longest, note=data.note)
    mean = mean_tokens or limit / 4
    rule = "a quarter of data.max_length_tokens"
    note = "" if mean_tokens else f"mean length {mean:,.0f} tokens is assumed, {rule}; --like or --mean-tokens sets it"
    return Lengths.evenly(mean, limit, note=note)


def _assumed_of_rl(config: RlConfig, mean_tokens: float | None, data: InFile | None) -> Lengths:
    prompt = config.data.max_prompt_tokens / 2 if data is None else data.mean
    if data is None and mean_tokens:
        prompt = min(prompt, mean_tokens / 2)  # a known mean may be less than half of the longest prompt
    mean = mean_tokens or prompt + config.rollout.max_response_tokens / 2
    if data is None:
        rule = "half of the longest prompt and of the longest response"
        note = f"mean length {mean:,.0f} tokens is assumed, {rule}; --like or --mean-tokens sets it"
        note = "" if mean_tokens else note
    else:
        rule = f"; mean length {mean:,.0f} tokens is assumed, with half of the longest response"
        note = data.note + ("" if mean_tokens else f"{rule}; --like or --mean-tokens sets it")
    return Lengths.evenly(max(1.0, mean - prompt), config.rollout.max_response_tokens, prompt, note)


def of_run_dir(path: Path, config: SftConfig | RlConfig) -> Lengths:
    """The lengths that the run in ``path`` had, on average over its steps. Raises ConfigError."""
    file = path / "metrics.jsonl"
    rows = [row for row in read_metrics(file) if row["step"]] if file.is_file() else []  # step 0 only validates
    if not rows:
        raise ConfigError(f"--like {path} has no metrics.jsonl with a step: give the folder of a run that made some.")
    note = f"lengths are those of {path}, the mean of its {len(rows)} steps"
    if isinstance(config, RlConfig):
        return of_rl_rows(rows, note)
    other = load_run(str(path / "config.toml"))
    mean = _mean(rows, "perf/total_num_tokens") / other.train.global_batch if isinstance(other, SftConfig) else 0.0
    if not mean:
        raise ConfigError(f"--like {path} is a run of RL, and {config.source} one of SFT: give a run of the same kind.")
    return Lengths.evenly(mean, config.max_sequence_tokens, note=note)


def of_rl_rows(rows: Sequence[Mapping[str, float]], note: str = "") -> Lengths:
    """The lengths of RL's steps. Raises ConfigError where their metrics have none."""
    if not any(row.keys() >= NEEDED for row in rows):
        raise ConfigError(f"{note}, and none has {min(NEEDED)}, as RL's steps have: give a run of the same kind.")
    steps = [row for row in rows if "behavior/model_tokens" in row]
    longest = _mean(rows, "response_length/max")
    return Lengths(
        shortest=_mean(rows, "response_length/min"), mean=_mean(rows, "response_length/mean"), longest=longest,
        median=_median(rows),
        prompt=_mean(rows, "prompt_length/mean"), limit=longest, note=note,
        sampled=_mean(steps, "behavior/model_tokens") / _mean(steps, "response_length/mean") if steps else 1.0,
        calls=_mean(steps, "behavior/calls") if steps else None,
        tool_s=_mean(steps, "behavior/tool_s") if steps else None,
    )  # fmt: skip


def _median(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Of all responses, where nearly all finished; the others' lengths are counted apart."""
    known = [row for row in rows if "length/finished/p50" in row and row["behavior/stop/finished"] >= FINISHED]
    return _mean(known, "length/finished/p50") if known else None


def _mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return fmean(row[key] for row in rows if key in row)
