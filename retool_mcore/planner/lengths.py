"""How long a run's sequences are: assumed from its configuration, or as another run had them."""

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
PROMPT, RESPONSE, ROW = 0.25, 0.4, 0.25  # assumed means, as shares of the longest
NEEDED = {"prompt_length/mean", "response_length/min", "response_length/mean", "response_length/max"}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a run's sequences. Those of SFT are all response.

    Responses rise from the shortest to the longest by a power law whose mean is ``mean``: evenly
    where the mean is in the middle, with few long ones where it is lower.
    """

    shortest: float
    mean: float
    longest: float
    prompt: float = 0.0  # mean
    limit: float  # one response in each engine is so long
    sampled: float = 1.0  # share of a response that the model sampled; tools wrote the rest
    calls: float | None = None  # of a response; None: not known
    tool_s: float | None = None  # that a response waits for its calls
    note: str = ""  # where they come from; "" where the user gave the mean

    @staticmethod
    def evenly(mean: float, limit: float, prompt: float = 0.0, note: str = "") -> "Lengths":
        """Around ``mean``, up to ``limit`` or down to nothing, whichever is nearer to it."""
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
        """``count`` responses of a step, shortest first."""
        rise = self.longest - self.shortest
        return [self.shortest + rise * ((number + 0.5) / count) ** self._power for number in range(count)]

    @property
    def _squares(self) -> float:
        """The mean square of the responses."""
        low, rise, power = self.shortest, self.longest - self.shortest, self._power
        return low**2 + 2 * low * rise / (power + 1) + rise**2 / (2 * power + 1)

    @property
    def spread(self) -> float:
        """The mean square of the sequences' lengths over the square of their mean."""
        return (self.prompt**2 + 2 * self.prompt * self.mean + self._squares) / self.sequence**2

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
    mean = mean_tokens or ROW * limit
    return Lengths.evenly(mean, limit, note=_note(mean_tokens, mean, f"{ROW:.0%} of data.max_length_tokens"))


def _assumed_of_rl(config: RlConfig, mean_tokens: float | None, data: InFile | None) -> Lengths:
    prompt = PROMPT * config.data.max_prompt_tokens if data is None else data.mean
    if data is None and mean_tokens:
        prompt = min(prompt, mean_tokens / 2)  # a known mean may be less than that
    longest = config.rollout.max_response_tokens
    mean = mean_tokens or prompt + RESPONSE * longest
    rule = f"{RESPONSE:.0%} of the longest response"
    rule = rule if data is not None else f"{PROMPT:.0%} of the longest prompt and {rule}"
    notes = [data.note if data is not None else "", _note(mean_tokens, mean, rule)]
    return Lengths.evenly(max(1.0, mean - prompt), longest, prompt, "; ".join(note for note in notes if note))


def _note(mean_tokens: float | None, mean: float, rule: str) -> str:
    return "" if mean_tokens else f"mean length {mean:,.0f} tokens is assumed, {rule}; --like or --mean-tokens sets it"


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
    if not isinstance(other, SftConfig):
        raise ConfigError(f"--like {path} is a run of RL, and {config.source} one of SFT: give a run of the same kind.")
    mean = _mean(rows, "perf/total_num_tokens") / other.train.global_batch
    return Lengths.evenly(mean, config.max_sequence_tokens, note=note)


def of_rl_rows(rows: Sequence[Mapping[str, float]], note: str = "") -> Lengths:
    """The lengths of RL's steps. Raises ConfigError where their metrics have none."""
    if not any(row.keys() >= NEEDED for row in rows):
        raise ConfigError(f"{note}, and none has {min(NEEDED)}, as RL's steps have: give a run of the same kind.")
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
