"""The parts of pages that are made: verl's keys, the planner's figures, a file of the examples.

python -m tests.docs.record     # writes them between `<!-- made: NAME -->` and `<!-- end -->`
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retool_mcore.config.load import load_run
from retool_mcore.config.reference import reference
from retool_mcore.model.files import shape_of_model
from retool_mcore.planner.hardware import hardware_of_run, parse
from retool_mcore.planner.lengths import assumed
from retool_mcore.planner.plan import make_plan
from retool_mcore.run.metric_table import as_markdown
from retool_mcore.run.metrics import read_metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

SFT_7B = "configs/sft_qwen2.5_7b_h200x8.toml"
RL_7B, RL_32B = "configs/rl_qwen2.5_7b_h200x8.toml", "configs/rl_qwen2.5_32b_h100x16.toml"
PACKED = "train.micro_batch_tokens=16384"
CHANGES = (
    "",
    "memory.fused_cross_entropy=false",
    "train.micro_batch_tokens=8192",
    "memory.adam_states=compact",
    "memory.adam_states=bfloat16",
    "memory.recompute=full",
    "memory.optimizer_on_cpu=1.0",
)
FOURTEEN = (
    "model.path=Qwen/Qwen2.5-14B-Instruct parallel.tp=4 train.micro_batch_tokens=9216 rollout.engine_tp=2 "
    "rollout.engine_memory_fraction=0.75"
)
QUARTER = "train.prompts_per_step=128"
RUNS = (  # title, configuration, changes, hardware, mean length or None
    ("7B on 8 H200", RL_7B, "", "h200x8", None),
    ("14B on 8 H100", RL_7B, FOURTEEN, "h100x8", None),
    ("14B on 8 H100, 128 prompts a step", RL_7B, f"{FOURTEEN} {QUARTER} train.steps=150", "h100x8", None),
    ("32B on 16 H100", RL_32B, "", "h100x16", None),
    ("32B on 16 H100, 128 prompts a step", RL_32B, QUARTER, "h100x16", None),
    ("32B on 16 H100, 128 prompts a step", RL_32B, f"{QUARTER} train.steps=150", "h100x16", None),
    ("32B on 16 H100, 8 responses a prompt", RL_32B, "rollout.group_size=8", "h100x16", None),
    ("32B on 16 H100, `algorithm.old_log_prob=rollout`", RL_32B, "algorithm.old_log_prob=rollout", "h100x16", None),
    ("32B on 16 H100, responses of 4,096 tokens on average", RL_32B, "", "h100x16", 4096.0),
)


def planned(config: str, changes: str, hardware: str, mean_tokens: float | None = None) -> dict[str, Any]:
    run = load_run(ROOT / config, changes.split())
    devices = parse(hardware) if hardware else hardware_of_run(run)
    made = make_plan(run, shape_of_model(run.model.path), devices, lengths=assumed(run, mean_tokens))
    return made.to_dict()


def memory() -> str:
    names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "total")
    rows = [f"| change | {' | '.join(names)} | fits | step (s) |", "|---" * 10 + "|"]
    for change in CHANGES:
        plan = planned(SFT_7B, f"{PACKED} {change}", "")
        parts = " | ".join(f"{plan['train_gib'][name]:.1f}" for name in names)
        fits = "yes" if plan["fits"] else "no"
        rows.append(f"| {f'`{change}`' if change else 'none'} | {parts} | {fits} | {plan['step_s']:.2f} |")
    return "\n".join(rows)


def duration() -> str:
    rows = ["| run | configuration | `--hardware` | step (s) | steps | total (hours) |", "|---" * 6 + "|"]
    for title, config, changes, hardware, mean_tokens in RUNS:
        plan = planned(config, changes, hardware, mean_tokens)
        assert plan["fits"], f"{title} does not fit: the page would plan what cannot run"
        hours = plan["total_hours"]
        steps = round(hours * 3600 / plan["step_s"])
        device = "" if hardware in config else hardware
        rows.append(f"| {title} | `{Path(config).name}` | {device} | {plan['step_s']:,.0f} | {steps} | {hours:,.0f} |")
    changed = f"The 14B rows add `{FOURTEEN}`."
    return "\n".join([*rows, "", changed])


WATCHED = (  # metric, what it should do
    ("critic/rewards/mean", "rise"),
    ("accuracy", "rise; it counts right answers, independent of the reward"),
    ("actor/entropy", "fall slowly"),
    ("actor/grad_norm", "stay in one order of magnitude"),
    ("actor/pg_clipfrac", "be 0 with one update a step"),
    ("groups/all_right", "rise"),
    ("groups/all_wrong", "fall"),
    ("behavior/executable_fraction", "stay high"),
    ("rollout_corr/kl", "stay near its first value"),
)


def recorded() -> str:
    steps = read_metrics(ROOT / "tests/report/quickstart/tool_rl/metrics.jsonl")
    rows = ["| metric | first step | last step | it should |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {steps[0][name]:.2g} | {steps[-1][name]:.2g} | {message} |" for name, message in WATCHED]
    return "\n".join(rows)


def mapping() -> str:
    """Our settings with the keys of verl that they decide; then verl's keys without a setting."""
    from retool_mcore.cli.from_verl import UNMAPPED, paths_of_settings

    rows = ["| setting | keys of verl |", "|---|---|"]
    found = paths_of_settings()
    for entry in reference(("rl",)):
        if entry.kind and entry.key in found:
            rows.append(f"| `{entry.key}` | {', '.join(f'`{path}`' for path in found[entry.key])} |")
    rows += ["", "| key of verl, or its prefix | why it has no setting |", "|---|---|"]
    rows += [f"| `{path}` | {why} |" for path, (_, why) in UNMAPPED.items()]
    return "\n".join(rows)


def chat() -> str:
    return f"```python\n{(ROOT / 'configs/examples/chat_with_tool.py').read_text(encoding='utf-8')}```"


MADE: dict[str, Callable[[], str]] = {
    "mapping": mapping,
    "memory": memory,
    "duration": duration,
    "chat": chat,
    "recorded": recorded,
    "metrics": as_markdown,
}


def filled(text: str) -> str:
    """A page with its made parts made anew."""
    return PART.sub(lambda match: f"{match[1]}{MADE[match[2]]()}\n{match[3]}", text)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
