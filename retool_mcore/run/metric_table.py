"""Table of all metrics: name, unit and meaning.

Each metric has one name: verl's, if verl has one. ``*`` is a wildcard. docs/metrics.md is generated
from this table. A run also writes every metric of a user's own code, such as ``mine/count`` or
``actor/my_penalty``; it leaves out the names in NOT_WRITTEN.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache

METRICS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Learning in RL": {
        "critic/rewards/mean": ("reward", "mean of the trajectories' rewards, with shaping and KL penalty"),
        "critic/score/mean": ("reward", "mean reward without the KL penalty; only if algorithm.kl_in is 'reward'"),
        "accuracy": ("share", "right answers, independent of the reward"),
        "reward/*": ("", "mean of each part of the reward; has_answer and check_failed are shares"),
        "actor/pg_loss": ("advantage", "algorithm.loss without the KL term; do not read progress from it"),
        "actor/grad_norm": ("", "before clipping, mean over the step's updates"),
        "actor/lr": ("", "learning rate of the step's last update"),
        "actor/entropy": (
            "nats a token",
            "of the actor at the start of the step; with algorithm.old_log_prob = 'rollout', the mean of -log p",
        ),
        "actor/kl_loss": ("nats a token", "KL to the reference, if it is in the loss"),
        "actor/kl_coef": ("", "coefficient of actor/kl_loss"),
        "actor/reward_kl_penalty": ("nats", "KL to the reference, if it is in the reward"),
        "actor/reward_kl_penalty_coeff": ("", "coefficient of actor/reward_kl_penalty"),
        "actor/ppo_kl": ("nats", "mean of log p_old - log p over the loss_tokens of all updates"),
        "actor/pg_clipfrac": ("share", "tokens whose gradient algorithm.clip removes"),
        "actor/pg_clipfrac_lower": ("share", "tokens whose gradient the third number of algorithm.clip removes"),
        "critic/vf_loss": ("", "the critic's loss, with a critic; NaN or infinity ends the run"),
        "critic/vf_clipfrac": ("share", "tokens whose gradient the clip of the critic's loss removes"),
        "critic/vf_explained_var": ("share", "variance of the returns that the critic explains"),
        "critic/grad_norm": ("", "the critic's, before clipping"),
        "critic/lr": ("", "the critic's learning rate"),
        "loss_tokens": ("tokens", "tokens in the loss, without masked and rejected ones"),
        "loss/masked_fraction": ("share", "responses without a token in the loss, by algorithm.mask"),
        "groups/all_right": ("share", "groups whose answers are all right, before algorithm.filter_groups"),
        "groups/all_wrong": ("share", "groups whose answers are all wrong, before algorithm.filter_groups"),
        "groups/same_reward": ("share", "groups whose rewards are all the same, so they teach nothing"),
        "curriculum/*": ("", "how often prompts are sampled, with data.curriculum"),
        "training/filter_groups/*": (
            "groups",
            "groups that algorithm.filter_groups replaced, and groups beyond those that the step needed",
        ),
    },
    "Mismatch of engine and actor": {
        "rollout_corr/kl": ("nats", "mean of log p_engine - log p_actor over sampled tokens"),
        "mismatch/p99": ("nats", "99th percentile of the absolute difference"),
        "mismatch/max": ("nats", "maximum of the absolute difference"),
        "training/rollout_probs_diff_max": ("", "largest difference of the probabilities"),
        "rollout_corr/rollout_is_mean": ("", "mean importance weight, with algorithm.importance_sampling"),
        "rollout_corr/rollout_is_min": ("", "smallest importance weight"),
        "rollout_corr/rollout_is_max": ("", "largest importance weight"),
        "rollout_corr/rollout_is_eff_sample_size": ("share", "effective sample size of the importance weights"),
        "rollout_corr/rollout_is_ratio_fraction_high": ("share", "importance weights above the bound"),
        "rollout_corr/rollout_rs_masked_fraction": ("share", "tokens that algorithm.rejection leaves out"),
        "rollout_corr/rollout_rs_seq_masked_fraction": ("share", "responses with at least one such token"),
        "training/off_policy/trajectory_staleness/mean": ("steps", "age of a response's newest token"),
        "training/off_policy/trajectory_staleness_worst/max": ("steps", "age of the oldest token in the batch"),
        "training/off_policy/trajectory_spans/max": ("steps", "largest number of weight versions in one response"),
        "training/off_policy/evicted_samples": ("", "trajectories that were too old"),
    },
    "Trajectories": {
        "behavior/code_ratio": ("share", "trajectories that executed a call"),
        "behavior/calls": ("", "executed calls of a trajectory"),
        "behavior/calls/*": ("", "executed calls of a trajectory, for each tool other than the interpreter"),
        "behavior/tool_faults/*": ("", "errors in your own tools' methods, except those that dropped the trajectory"),
        "behavior/turns": ("", "turns of a trajectory"),
        "behavior/requests": ("", "engine requests; more than turns after aborts or stops that complete no call"),
        "behavior/model_tokens": ("tokens", "tokens of a response that the model sampled"),
        "behavior/response_tokens": ("tokens", "mean response length in validations"),
        "behavior/code_lines": ("", "lines of code sent to the interpreter, per tool call"),
        "behavior/executable_fraction": ("share", "calls that ran to their end and returned 0"),
        "behavior/limit_fraction": ("share", "calls that were stopped at the time or memory limit"),
        "behavior/correct_code_fraction": (
            "share",
            "trajectories with a right answer whose last call succeeded, of those with a call",
        ),
        "behavior/first_call_position": ("share", "position of the first call's end in the response"),
        "behavior/self_corrections": ("", "failed calls whose next call has other code and succeeds"),
        "behavior/cut_tokens": ("tokens", "tokens cut from the results of a trajectory"),
        "behavior/malformed/*": ("", "calls of a trajectory that could not be read, by problem"),
        "behavior/stop/*": ("share", "trajectories by their stop reason"),
        "behavior/tool_s": ("s", "a trajectory's wait for the interpreter"),
        "behavior/slowest_s": ("s", "the slowest trajectory's wait for engine and interpreter"),
        "response_length/mean": ("tokens", "mean response length, including tool output"),
        "response_length/min": ("tokens", "shortest response"),
        "response_length/max": ("tokens", "longest response"),
        "prompt_length/mean": ("tokens", "mean prompt length"),
        "length/finished/p99": ("tokens", "99th percentile of the lengths of responses that the model ended"),
        "tool/latency_s/p99": ("s", "99th percentile of a call's time from request to answer"),
        "tool/queue_s/p99": ("s", "99th percentile of a call's wait for a worker slot"),
        "rollout/dropped": ("", "trajectories dropped by outages or exceptions in tools"),
        "rollout/refilled_prompts": ("", "replacement prompts"),
        "engine/running/mean": ("", "requests that a server computes"),
        "engine/queued/mean": ("", "requests that wait in a server"),
        "engine/cache_hit_rate": ("share", "request tokens that the engine had in its prefix cache"),
        "engine/restarts": ("", "restarts of engines since the previous row"),
    },
    "SFT": {
        "loss": ("nats a token", "mean over the global batch's trained tokens"),
        "grad_norm": ("", "before clipping"),
        "lr": ("", "learning rate of the step"),
        "val_loss": ("nats a token", "of validation.files"),
        "gpu_percent": ("%", "share of the last second in which the logging rank's device was busy"),
    },
    "Validation in RL": {
        "val/accuracy": ("share", "right answers; accuracy/low and accuracy/high are its 95 % interval"),
        "val/*": ("", "metrics of groups, trajectories and reward parts, as above"),
        "val-core/*/mean@*": ("share", "accuracy of each data source, by verl"),
        "val-core/*/mean": (
            "share",
            "verl's best@N/mean and maj@N/mean: accuracy of the best of N answers, and of their majority vote",
        ),
        "best/*": ("", "with best.metric: the best step, its value, and validations since the last improvement"),
    },
    "Speed": {
        "perf/total_num_tokens": ("tokens", "all tokens of the step, over all ranks, without padding rows"),
        "tokens_per_s": (
            "tokens/s",
            "perf/total_num_tokens / (timing_s/step without checkpoints and validation), over all GPUs",
        ),
        "perf/throughput": ("tokens/s", "tokens_per_s / GPUs of [cluster]"),
        "flops": ("FLOP", "model FLOPs of the step, by ModelShape.train_flops"),
        "mfu": ("share", "flops / (peak FLOP/s * training GPUs * seconds of the update); absent without a known peak"),
        "memory_gib": ("GiB", "highest so far on any rank: the device's allocator, or resident memory on a CPU"),
        "experts/*": ("", "load_max_over_mean of a layer's experts (1: all equal), and the share of unused experts"),
    },
    "Time": {
        "timing_s/step": (
            "s",
            "wall time of the step. In RL, timing_s/testing, metrics and between_steps are not part of it",
        ),
        "timing_s/gen": ("s", "waiting for the step's trajectories"),
        "timing_s/tool_wait": ("s", "part of timing_s/gen in which the slowest trajectory waited for the interpreter"),
        "timing_s/engine_sleep": ("s", "part of timing_s/gen: waiting until the engines have released their memory"),
        "timing_s/reward": ("s", "rewards that verl computes after sampling"),
        "timing_s/old_log_prob": ("s", "the actor's log-probabilities before the update"),
        "timing_s/ref": ("s", "log-probabilities of the reference model"),
        "timing_s/values": ("s", "the critic's values"),
        "timing_s/adv": ("s", "advantages, importance weights and rejection"),
        "timing_s/update_critic": ("s", "the critic's updates"),
        "timing_s/update_actor": ("s", "the actor's updates"),
        "timing_s/update_weights": ("s", "sending the weights to the engines"),
        "timing_s/data": ("s", "SFT: preparing the batch"),
        "timing_s/forward_backward": ("s", "SFT: forward and backward passes"),
        "timing_s/optimizer": ("s", "SFT: the optimizer's step"),
        "timing_s/validate": ("s", "SFT: a validation"),
        "timing_s/save_checkpoint": ("s", "the part of a save that the step waits for"),
        "timing_s/other": ("s", "the rest of the step"),
        "timing_s/testing": ("s", "RL: a validation, after the step"),
        "timing_s/metrics": ("s", "RL: computing this row, after the step"),
        "timing_s/between_steps": ("s", "RL: from writing the previous row to the start of the step"),
        "timing_s/start": ("s", "from the first check to the first step; only in a start's first row of metrics"),
        "timing_s/start/*": ("s", "stages of timing_s/start, which run/start.py names"),
    },
}  # fmt: skip

# Names of verl 0.9.1 and of this package that nothing reads, and duplicates of other names. A name
# that is also in METRICS is written.
NOT_WRITTEN = (
    *("actor/loss", "actor/loss_tokens", "actor/entropy_loss", "actor/mfu", "actor/perf/*"),
    *("critic/loss", "critic/loss_tokens", "critic/mfu", "critic/perf/*", "critic/vpred_mean"),
    *("critic/advantages/*", "critic/returns/*", "critic/values/*", "critic/rewards/*", "critic/score/*"),
    *("rollout_corr/*", "training/*", "timing_s/*", "timing_per_token_ms/*", "perf/*", "global_seqlen/*"),
    *("num_turns/*", "prompt_length/*", "response/*", "response_length/*", "response_length_non_aborted/*"),
    *("val-core/*", "val-aux/*", "behavior/engine_s", "behavior/slowest_tool_s", "behavior/cut_output_fraction"),
    *("behavior/repaired/*", "length/*", "tool/*"),
)
VALIDATION = ("val/", "val-core/", "best/")


def is_written(name: str) -> bool:
    """Whether a run writes the metric ``name``."""
    name = name.removeprefix("val/")
    return _matches(name, tuple(_names())) or not _matches(name, NOT_WRITTEN)


def is_of_validation(name: str) -> bool:
    """Whether ``name`` is a metric of RL validations, which get their own rows."""
    return name.startswith(VALIDATION)


def _names() -> list[str]:
    return [name for section in METRICS.values() for name in section]


@cache
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def as_markdown() -> str:
    """Render the tables of docs/metrics.md."""
    lines: list[str] = []
    for title, names in METRICS.items():
        lines += [f"### {title}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in names.items()]
        lines.append("")
    return "\n".join(lines).rstrip()
