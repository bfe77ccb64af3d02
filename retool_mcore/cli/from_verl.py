"""Converts verl's run file to ours: `retool config from-verl`.

The tables in verl/keys map each of verl's keys to the setting that decides it. This module inverts
them, and converts values that differ between the two. docs/from_verl.md is generated from them.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
import tomli_w

from retool_mcore.cli.verl_files import overrides, read_file
from retool_mcore.config import RlConfig, build_config
from retool_mcore.config.algorithm import REFILL_BATCHES
from retool_mcore.config.base import is_table
from retool_mcore.config.reference import reference
from retool_mcore.config.sampling import INTERPRETER
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import PLATFORMS, get_platform
from retool_mcore.run.checkpoint import flat
from retool_mcore.verl.keys.algorithm import ESTIMATORS, KL_TYPES, LOSSES
from retool_mcore.verl.keys.key import ACTOR_PREFIX, CRITIC_PREFIX, NOT_SET, REFERENCE_PREFIX, ROLLOUT_PREFIX, Key
from retool_mcore.verl.keys.tree import RL_KEYS, RL_TABLES, decided_by, ppo_defaults, ppo_keys

# Keys that our trainer never sets, and the settings that take their values.
SAME = (
    Key(f"{ACTOR_PREFIX}ulysses_sequence_parallel_size", "parallel.cp"),
    Key(f"{ACTOR_PREFIX}fsdp_config.ulysses_sequence_parallel_size", "parallel.cp"),
    Key(f"{ACTOR_PREFIX}fsdp_config.param_offload", "memory.offload_idle"),
    Key(f"{ACTOR_PREFIX}fsdp_config.optimizer_offload", "memory.offload_idle"),
    Key("trainer.nnodes", "cluster.nodes"),
    Key("trainer.n_gpus_per_node", "cluster.gpus_per_node"),
    Key(f"{ROLLOUT_PREFIX}multi_turn.enable", "rollout.tools"),
    Key(f"{ROLLOUT_PREFIX}multi_turn.format", "rollout.protocol"),
)
USE_TOOLS = 'name your tools in rollout.tools = ["module:Name"], or MCP servers in rollout.mcp'
# Keys of verl (or prefixes of keys) without a setting, and the reason. The longest prefix applies.
LOST: dict[str, str] = {
    f"{ACTOR_PREFIX}ppo_epochs": "a step trains once on each response",
    "algorithm.use_pf_ppo": "we do not resample responses by their rewards (PF-PPO)",
    "algorithm.pf_ppo": "we do not resample responses by their rewards (PF-PPO)",
}
REPLACED: dict[str, str] = {
    f"{ACTOR_PREFIX}strategy": "we train with Megatron, not FSDP: see [parallel] and [memory]",
    f"{ACTOR_PREFIX}fsdp_config": "we train with Megatron, not FSDP: see [parallel] and [memory]",
    "actor_rollout_ref.ref": "the reference model has the actor's layout",
    "critic": "the critic has the actor's layout, and settings in [critic]",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "set memory.recompute",
    f"{ACTOR_PREFIX}ppo_micro_batch_size": "every pass packs micro-batches up to train.micro_batch_tokens",
    f"{ACTOR_PREFIX}use_dynamic_bsz": "every pass packs micro-batches up to train.micro_batch_tokens",
    f"{ROLLOUT_PREFIX}log_prob": "every pass packs micro-batches up to train.micro_batch_tokens",
    f"{ROLLOUT_PREFIX}multi_turn": "we have our own tool loop: see [rollout]",
    f"{ROLLOUT_PREFIX}multi_turn.tool_config_path": USE_TOOLS,
    f"{ROLLOUT_PREFIX}multi_turn.max_user_turns": "rollout.max_turns counts the model's turns, not the results",
    f"{ROLLOUT_PREFIX}multi_turn.max_tool_response_length": (
        "rollout.max_tool_output_tokens counts tokens, not characters"
    ),
    f"{ROLLOUT_PREFIX}multi_turn.tool_response_truncate_side": (
        "rollouts cut the middle of a long result and mark the cut"
    ),
    f"{ROLLOUT_PREFIX}multi_turn.max_parallel_calls": 'rollout.calls_per_turn is "first" or "all"',
    "data.tool_config_path": USE_TOOLS,
    "data.custom_cls": "rows have a fixed schema; `retool data rl FILE` converts rows of another schema",
    "data.prompt_key": "the column is `prompt`; `retool data rl FILE` converts rows of another schema",
    "data.filter_overlong_prompts": "a prompt above data.max_prompt_tokens is an error; `retool data lint` finds it",
    "custom_reward_function": 'write score(response) and set reward.function = "module:score": docs/tool_and_reward.md',
    "reward_model": '[reward] has its own judge; reward.function = "module:score" replaces it',
    "reward": '[reward] has its own judge; reward.function = "module:score" replaces it',
    "trainer.total_epochs": "train.steps counts steps",
    "trainer.logger": "set run.trackers; metrics.jsonl is always written",
    "trainer.project_name": "trackers group runs by run.name",
}
NO_EFFECT: dict[str, str] = {
    "hydra": "a run has a single file",
    "defaults": "a run has a single file",
    f"{ACTOR_PREFIX}clip_ratio": "verl's loss reads clip_ratio_low and clip_ratio_high",
    f"{ROLLOUT_PREFIX}val_kwargs.do_sample": "verl's agent loop reads only val_kwargs.temperature",
}
GROUPS = {"Lost": LOST, "Replaced": REPLACED, "Without effect": NO_EFFECT}
UNMAPPED = {path: (group, why) for group, table in GROUPS.items() for path, why in table.items()}

Get = Callable[[str], Any]  # verl's key -> its value in the file, or verl's default
FIXED = {under + key.path for under, keys in RL_TABLES for key in keys if key.decided_by is None}
MEGATRON = f"{ACTOR_PREFIX}megatron.override_transformer_config."
FSDP = "choose parallel.tp: `retool plan` proposes layouts. verl's FSDP file has no Megatron layout"
# Settings whose default in verl changes what the model learns. If the file does not set one, its
# default in verl is written where it differs from ours.
LEARNING = ("algorithm.", "critic.", "optim.", "train.", "validation.", "cluster.", "data.max")
LEARNING_ROLLOUT = ("group_size", "temperature", "top_p", "max_response_tokens", "tools")
MODES = {"sync": "sync", "colocate_async": "partial_rollout", "separate_async": "async"}
# Settings that `_fill` skips: they differ too much from verl's keys. `convert` sets run.platform.
BY_HAND = (
    "algorithm.rejection",
    "algorithm.router_replay",
    "checkpoint.reshardable",
    "checkpoint.resume",
    "experts.load_balancing",
    "memory.adam_states",
    "memory.optimizer_on_cpu",
    "model.fp8",
    "reward.workers",
    "rollout.agent_workers",
    "run.platform",
    "train.max_staleness",
    "train.prefetch_batches",
)


@dataclass
class Converted:
    """A converted run file.

    - ``source``: the name of verl's file.
    - ``settings``: "section.key" -> (value, origin).
    - ``notes``: (group, "key = value" of verl) -> the reason why there is no setting for it.
    - ``todo``: what the user has to do before the file can be used.
    """

    source: str
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict[str, tuple[Any, str]])
    notes: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    todo: list[str] = field(default_factory=list[str])

    def ordered(self) -> dict[str, tuple[Any, str]]:
        """The settings in the order of the reference."""
        return {entry.key: self.settings[entry.key] for entry in reference(("rl",)) if entry.key in self.settings}

    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, (value, _) in self.settings.items():
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        return tree

    def toml(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"# RL, converted from verl's {self.source}. Comments name the source of each value. Check all values."
        section = ""
        for name, (value, origin) in self.ordered().items():
            if name.partition(".")[0] != section:
                section = name.partition(".")[0]
                yield f"\n[{section}]"
            yield f"{_assignment(name.partition('.')[2], value)}  # {origin}"
        if self.todo:
            yield "\n# To do:"
            yield from (f"# {item}" for item in self.todo)
        for group in GROUPS:
            if lines := [f"# {key}: {why}" for (where, key), why in self.notes.items() if where == group]:
                yield from (f"\n# {group}:", *lines)


def _assignment(key: str, value: Any) -> str:
    if is_table(value):
        return f"{key} = {{ {', '.join(_assignment(name, item) for name, item in value.items())} }}"
    if isinstance(value, list):
        return f"{key} = [{', '.join(_assignment('', item)[3:] for item in value)}]"  # pyright: ignore[reportUnknownVariableType]
    name = key or "v"
    return tomli_w.dumps({name: value}).strip() if key else f" = {tomli_w.dumps({name: value}).strip()[4:]}"


def paths_of_settings() -> dict[str, list[str]]:
    """Our setting -> the keys of verl that it decides. Keys of reference and critic that repeat the
    actor's are left out.
    """
    known = {entry.key for entry in reference(("rl",)) if entry.kind}
    found: dict[str, list[str]] = {}
    tables = [(under, key) for under, keys in RL_TABLES for key in keys] + [("", key) for key in SAME]
    for under, key in tables:
        path, setting = under + key.path, key.decided_by
        repeated = path.startswith((REFERENCE_PREFIX, CRITIC_PREFIX)) and not (setting or "").startswith("critic.")
        if setting in known and not repeated and path not in UNMAPPED and path not in found.setdefault(setting, []):
            found[setting].append(path)
    return found


def convert(path: Path, extra: list[str] | None = None, platform: str | None = None) -> Converted:
    """Convert verl's file ``path`` with ``extra`` overrides to a run file. Raises ConfigError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    users = OmegaConf.merge(read_file(path), overrides(extra or [], "the command line"))
    whole = ppo_defaults()
    OmegaConf.set_struct(whole, False)
    whole = OmegaConf.merge(whole, users)
    plain: Any = OmegaConf.to_container(users, resolve=False)
    file_values = flat(plain)
    for key, value in file_values.items():
        if isinstance(value, str) and "$" in value and not value.startswith("${") and key.split(".")[0] not in UNMAPPED:
            raise ConfigError(f"{path}: {key}={value} uses a variable that the script does not set. Add {key}=VALUE.")

    def get(key: str) -> Any:
        try:
            found = OmegaConf.select(whole, key)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: {key} cannot be resolved: {str(error).splitlines()[0]}.") from error
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found

    file_values = {key: value if key.split(".")[0] in UNMAPPED else get(key) for key, value in file_values.items()}
    platform_name = platform or _platform_of(get("trainer.device"))
    converted = Converted(source=path.name)
    converted.settings["run.platform"] = (platform_name, "--platform" if platform else "trainer.device")
    used = _fill(converted, file_values, get)
    if not any("megatron" in key or value == "megatron" for key, value in file_values.items()):
        converted.todo.append(FSDP)
    _count_steps(converted, get)
    converted.settings.setdefault("model.dtype", ("bfloat16", "verl's default"))
    _explain(converted, file_values, used, platform_name)
    return converted


def _count_steps(converted: Converted, get: Get) -> None:
    """Compute train.steps from verl's epochs, if the training files exist here."""
    if "train.steps" in converted.settings:
        return
    epochs, batch, files = get("trainer.total_epochs"), get("data.train_batch_size"), _list(get("data.train_files"))
    origin = f"trainer.total_epochs ({epochs}) * rows of data.train_files / data.train_batch_size ({batch})"
    try:
        rows = sum(cast("Any", pq).read_metadata(file).num_rows for file in files)
    except (OSError, TypeError):
        converted.todo.append(f"set train.steps to {origin}")
    else:
        converted.settings["train.steps"] = (max(1, epochs * (rows // batch)), f"{origin}, {rows} rows")


def _platform_of(device: str) -> str:
    """The name of the platform with verl's device name. Raises ConfigError if there is none."""
    found = [name for name in PLATFORMS if get_platform(name).device.name == device]
    if not found:
        raise ConfigError(f"Unknown trainer.device = {device}. Choose one of: --platform {', '.join(PLATFORMS)}.")
    return found[0]


def _fill(converted: Converted, file_values: Mapping[str, Any], get: Get) -> set[str]:
    """Set what the file sets, and verl's defaults that change what the model learns.

    Returns the keys of the file that it used.
    """
    defaults = {entry.key: entry.default for entry in reference(("rl",))}
    used: set[str] = set()
    for setting, paths in paths_of_settings().items():
        if setting in BY_HAND:
            continue
        read: list[str] = []

        def recorded(key: str, read: list[str] = read) -> Any:
            read.append(key)
            return get(key)

        in_file = [path for path in paths if _is_set(path, file_values)]
        if not _applies(setting, get):
            continue
        value = _value(setting, (in_file or paths)[-1], recorded)
        origins = [key for key in dict.fromkeys(read) if _is_set(key, file_values)]
        learning = setting.startswith(LEARNING) or setting in {f"rollout.{name}" for name in LEARNING_ROLLOUT}
        if value is NOT_SET or not (origins or in_file or learning):
            continue
        used.update(origins or in_file)
        if origins or in_file or json.dumps(value) != defaults[setting]:
            converted.settings[setting] = (value, " and ".join(origins or in_file) or "verl's default")
    return used


def _is_set(path: str, file_values: Mapping[str, Any]) -> bool:
    return any(key == path or key.startswith(f"{path}.") for key in file_values)


def _applies(setting: str, get: Get) -> bool:
    """Whether the run uses the setting. Our schema refuses a setting that has no effect."""
    name, loss, key = (
        get("algorithm.adv_estimator"),
        get(f"{ACTOR_PREFIX}policy_loss.loss_mode"),
        setting.partition(".")[2],
    )
    if setting.startswith("critic.") or key == "lam":
        return name == "gae"
    return {
        "gamma": name in ("gae", "reinforce_plus_plus"),
        "tau": loss == "sapo",
        "kl_type": _kl(get) > 0,
        "kl_in": _kl(get) > 0,
        "importance_bounds": False,
        "rejection_bounds": False,
    }.get(key, True)


def _kl(get: Get) -> float:
    if get("algorithm.use_kl_in_reward"):
        return get("algorithm.kl_ctrl.kl_coef")
    return get(f"{ACTOR_PREFIX}kl_loss_coef") if get(f"{ACTOR_PREFIX}use_kl_loss") else 0.0


def _packed(get: Get) -> int:
    """Tokens per micro-batch: verl's token budget, or its number of rows times the full length."""
    if get(f"{ACTOR_PREFIX}use_dynamic_bsz"):
        return get(f"{ACTOR_PREFIX}ppo_max_token_len_per_gpu")
    rows = get(f"{ACTOR_PREFIX}ppo_micro_batch_size_per_gpu") or 1
    return rows * (get("data.max_prompt_length") + get("data.max_response_length"))


def _warm_up(get: Get) -> Any:
    steps = get(f"{ACTOR_PREFIX}optim.lr_warmup_steps")
    if steps is None or steps <= 0:
        return get(f"{ACTOR_PREFIX}optim.lr_warmup_steps_ratio")
    if not get("trainer.total_training_steps"):
        return NOT_SET
    updates = (
        get("trainer.total_training_steps") * get("data.train_batch_size") / get(f"{ACTOR_PREFIX}ppo_mini_batch_size")
    )
    return steps / updates


def _value(setting: str, path: str, get: Get) -> Any:
    """The setting's value, from verl's value at ``path``. NOT_SET if verl has none."""
    reader = READERS.get(setting)
    value = reader(get) if reader else get(path)
    if setting in NAMES:
        value = NAMES[setting].get(value, value)
    if value is None or value == "":
        return NOT_SET
    return float(value) if setting in FLOATS else value


def _list(found: Any) -> list[Any]:
    return cast("list[Any]", found) if isinstance(found, list) else [found]


def _train_file(get: Get) -> Any:
    """The training file; NOT_SET if there are several: the user has to put them into one folder."""
    files = _list(get("data.train_files"))
    return files[0] if len(files) == 1 else NOT_SET


def _tools(get: Get) -> list[str]:
    """The interpreter if verl's file enables tools, whatever they are."""
    tool_config = get(f"{ROLLOUT_PREFIX}multi_turn.tool_config_path")
    return [INTERPRETER] if tool_config or get(f"{ROLLOUT_PREFIX}multi_turn.enable") else []


def _clip(get: Get) -> list[float]:
    dual = get(f"{ACTOR_PREFIX}policy_loss.loss_mode") == "vanilla"
    return [float(get(f"{ACTOR_PREFIX}clip_ratio_{bound}")) for bound in ("low", "high", *(["c"] if dual else []))]


def _filter(get: Get) -> int:
    limit = get("algorithm.filter_groups.max_num_gen_batches") or 0  # in verl, 0 means no limit
    return (limit if limit > 0 else REFILL_BATCHES) if get("algorithm.filter_groups.enable") else 0


def _recompute(get: Get) -> str | int:
    level, method, layers = (get(f"{MEGATRON}recompute_{name}") for name in ("granularity", "method", "num_layers"))
    return layers if level == "full" and method == "block" and layers else level or "none"


NAMES: dict[str, dict[Any, Any]] = {
    "algorithm.name": {theirs: ours for ours, theirs in ESTIMATORS.items()},
    "algorithm.loss": {theirs: ours for ours, theirs in LOSSES.items()},
    "algorithm.kl_type": {theirs: ours for ours, theirs in KL_TYPES.items()} | {"kl": "k1", "mse": "k2"},
    "algorithm.importance_sampling": {None: "off"},
    "rollout.precision": {None: "model"},
    "train.mode": MODES,
}
FLOATS = {entry.key for entry in reference(("rl",)) if entry.kind.startswith("a number")}
READERS: dict[str, Callable[[Get], Any]] = {  # settings that are not simply the value of their key of verl
    "algorithm.filter_groups": _filter,
    "algorithm.clip": _clip,
    "algorithm.tau": lambda get: [float(get(f"{ACTOR_PREFIX}tau_{side}")) for side in ("pos", "neg")],
    "algorithm.kl_coef": _kl,
    "algorithm.kl_in": lambda get: "reward" if get("algorithm.use_kl_in_reward") else "loss",
    "algorithm.kl_type": lambda get: get(
        "algorithm.kl_penalty" if get("algorithm.use_kl_in_reward") else f"{ACTOR_PREFIX}kl_loss_type"
    ),
    "algorithm.loss_agg": lambda get: get(f"{ACTOR_PREFIX}loss_agg_mode"),
    "critic.warmup_steps": lambda get: max(0, get("trainer.critic_warmup") - 1),
    "cluster.gpus_per_node": lambda get: get("trainer.n_gpus_per_node"),
    "data.train_file": _train_file,
    "data.max_prompt_tokens": lambda get: get("data.max_prompt_length"),
    "rollout.max_response_tokens": lambda get: get("data.max_response_length"),
    "rollout.tools": _tools,
    "validation.files": lambda get: _list(get("data.val_files")),
    "validation.every": lambda get: max(0, get("trainer.test_freq") or 0),
    "checkpoint.every_steps": lambda get: max(0, get("trainer.save_freq") or 0),
    "model.dtype": lambda get: get(f"{ACTOR_PREFIX}megatron.dtype"),
    "train.steps": lambda get: get("trainer.total_training_steps"),
    "train.micro_batch_tokens": _packed,
    "train.mode": lambda get: get("trainer.v1.trainer_mode"),
    "run.name": lambda get: re.sub(r"[^A-Za-z0-9._-]+", "_", get("trainer.experiment_name")).lstrip("._-"),
    "memory.recompute": _recompute,
    "optim.warmup_fraction": _warm_up,
    "optim.betas": lambda get: [float(beta) for beta in get(f"{ACTOR_PREFIX}optim.betas")],
}


def _explain(converted: Converted, file_values: Mapping[str, Any], used: set[str], platform: str) -> None:
    """Add a note for each key of the file without a setting, with the reason."""
    ours: dict[str, Any] = {}
    tree = converted.tree()
    tree.setdefault("train", {}).setdefault("steps", 1)  # _count_steps may have left it to the user
    try:
        ours = ppo_keys(build_config(RlConfig, tree, converted.source), get_platform(platform))
    except ConfigError as error:
        converted.todo.append(" ".join(str(error).split()))
    for key, value in file_values.items():
        if any(key == path or key.startswith(f"{path}.") for path in used) or _equal(ours.get(key, NOT_SET), value):
            continue
        group, why = reason(key, ours)
        converted.notes[group, f"{key} = {value}"] = why


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs)
    return ours == theirs


def reason(key: str, ours: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """The group of a key of verl without a setting, and the reason."""
    by = decided_by(key, RL_KEYS | {key.path: str(key.decided_by) for key in SAME})
    if by in BY_HAND:
        return "Replaced", f"set {by} yourself: see `retool config --explain {by}`"
    prefixes = [path for path in UNMAPPED if key.startswith(path)]
    if prefixes:
        return UNMAPPED[max(prefixes, key=len)]
    if by:
        return "Without effect", f"we take {by} from another key"
    if ours and key in ours:
        return "Replaced", f"our trainer sets it to {ours[key]!r}; [verl_overrides] can change it"
    if key in FIXED:
        return "Replaced", "our trainer sets it; [verl_overrides] can change it"
    return "Lost", "no setting for it; [verl_overrides] accepts keys of verl 0.9.1"
