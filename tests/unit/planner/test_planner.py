"""The planner: lengths, caches, limits, and `retool plan` as a command."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.config.lora import Lora
from retool_mcore.errors import ConfigError
from retool_mcore.model.shape import PUBLISHED, ModelShape
from retool_mcore.planner.hardware import GIB, hardware_of_run, parse
from retool_mcore.planner.lengths import Lengths, lengths_of_rows, lengths_of_run_dir
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.report import refusal, report
from tests.unit.planner.plans import CONFIGS, SEVEN, THIRTY_TWO, rl, sft

H200 = parse("h200x8")


def command(config: str, *words: str) -> Any:
    return CliRunner().invoke(all_commands(), ["plan", str(CONFIGS / config), *words])


def row(scale: float, **more: float) -> dict[str, float]:
    names = ("prompt_length/mean", "response_length/min", "response_length/mean", "response_length/max")
    return {name: scale * value for name, value in zip(names, (10, 2, 20, 50), strict=True)} | more


def test_a_plan_has_the_lengths_of_a_previous_run_of_its_kind(tmp_path: Path):
    run = rl("rl_qwen2.5_7b_h200x8")

    def write(kind: str, *rows: dict[str, float]) -> None:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
        (tmp_path / "config.toml").write_text((CONFIGS / f"{kind}_tiny_cpu.toml").read_text(encoding="utf-8"))

    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl with a step"):
        lengths_of_run_dir(tmp_path, run)
    write("rl", {"step": 0, "val-core/math/acc/mean@8": 0.5}, row(1, step=1), row(3, step=2))
    found = lengths_of_run_dir(tmp_path, run)
    assert found.sequence == 60 and "2 steps" in found.note and str(tmp_path) in found.note
    with pytest.raises(ConfigError, match="Give a run of the same kind"):
        lengths_of_run_dir(tmp_path, sft())
    write("sft", *({"step": step, "perf/total_num_tokens": 32_000 * step} for step in (1, 2)))
    with pytest.raises(ConfigError, match="Give an RL run"):
        lengths_of_run_dir(tmp_path, run)
    found = lengths_of_run_dir(tmp_path, sft("train.global_batch=64"))
    assert found.mean == 1500, "32 rows a step, by the settings of that run"


def test_lengths_of_steps_are_means_and_what_some_steps_lack_is_of_the_others():
    calls = {"behavior/model_tokens": 15.0, "behavior/calls": 3.0, "behavior/tool_s": 0.5}
    assert lengths_of_rows([row(1, **calls), row(3)], "noted") == Lengths(
        shortest=4, mean=40, longest=100, limit=100, prompt=20, sampled=15 / 20, calls=3, tool_s=0.5, note="noted"
    )
    assert lengths_of_rows([row(1)]).calls is None


def test_a_distribution_of_lengths_has_the_moments_of_its_quantiles():
    lengths = Lengths(shortest=100, mean=300, longest=900, limit=1000, prompt=50)
    drawn = lengths.quantiles(20_000)
    assert (min(drawn), fmean(drawn), max(drawn)) == pytest.approx((100, 300, 900), rel=1e-3)
    squares = fmean((50 + each) ** 2 for each in drawn)
    assert (lengths.sequence, lengths.spread) == (350, pytest.approx(squares / 350**2, rel=1e-3))
    assert lengths.context == pytest.approx(50 + fmean(each**2 for each in drawn) / (2 * 300), rel=1e-3)
    for mean, low, high in ((300, 0, 600), (800, 600, 1000), (1200, 1200, 1200)):
        even = Lengths.evenly(mean, 1000)
        assert (even.shortest, even.mean, even.longest, even.limit) == (low, mean, high, max(1000, mean))


def test_flops_by_hand():
    """A layer of 24 + 12 + 12 + 24 in attention and 3 * 20 in the MLP; a head of 28; two rows."""
    shape = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False)
    attention = 6 * 2 * 2 * 3 * (1 + 9)
    assert shape.train_flops([1, 3], Lora()) == 6 * (2 * 132 + 28) * 4 + attention == 7728
    thin = Lora(rank=1, targets=["q_proj", "down_proj"])  # A and B: 4 + 6, and 5 + 4
    assert shape.train_flops([1, 3], thin) == (4 * 292 + 6 * 2 * 19) * 4 + attention == 6304
    assert shape.product_flops(1, thin) == 2 * (292 + 2 * 19), "a forward pass has no gradient to leave out"
    assert shape.product_flops(4, thin) == 2 * (3 * 292 + 4 * 2 * 19), "all of it computed twice"


def test_a_cache_that_is_held_to_a_number_of_tokens_takes_their_memory_alone():
    """Each of the two GPUs of an engine holds half of the heads. The share remains the limit."""
    settings = ((), *((f"rollout.engine_args={{max_total_tokens={count}}}",) for count in (100_000, 1_000_000_000)))
    runs = [rl("rl_qwen2.5_7b_h200x8", "rollout.engine_tp=2", *more) for more in settings]
    free, held, beyond = (make_plan(run, SEVEN, H200).rollout for run in runs)
    assert free and held and beyond
    assert held.kv_cache == pytest.approx(100_000 * 57_344 / 2 / GIB) and held.kv_tokens == 100_000
    assert held.total == pytest.approx(free.total - free.kv_cache + held.kv_cache)
    assert beyond == free


def test_sglang_takes_its_share_of_what_the_idle_actor_leaves():
    def cache(offload: str) -> float:
        run = rl("rl_qwen2.5_7b_h200x8", "rollout.engine_memory_fraction=0.5", f"memory.offload_idle={offload}")
        rollout = make_plan(run, SEVEN, H200).rollout
        assert rollout is not None
        return rollout.kv_cache

    idle = make_plan(rl("rl_qwen2.5_7b_h200x8"), SEVEN, H200).train.idle
    assert cache("true") - cache("false") == pytest.approx(0.5 * idle)


def test_the_hardware_of_a_run_is_in_its_name_and_fits_its_cluster():
    named = ("run.platform=cuda", "run.name=mine_h100x2", "cluster.gpus_per_node=2")
    assert hardware_of_run(rl("rl_tiny_cpu", *named)) == parse("h100x2")
    for other in ("run.platform=cpu", "cluster.gpus_per_node=4", "run.name=h100x2b"):
        with pytest.raises(ConfigError, match=r"neither the file's name nor run\.name contains the GPU to plan for"):
            hardware_of_run(rl("rl_tiny_cpu", *named, other))
    assert [parse("H100x16").link(ranks) for ranks in (8, 9)] == [450e9, 50e9], "within a node, and beyond it"


def test_what_cannot_fit_is_refused_and_by_how_much():
    def refused(name: str, hardware: str, *settings: str) -> str:
        plan = make_plan(rl(name, *settings), THIRTY_TWO, parse(hardware))
        assert not plan.fits
        return refusal(plan, parse(hardware))

    done = command("sft_qwen2.5_32b_h200x8.toml", "parallel.tp=1")
    assert done.exit_code == 2
    assert "training does not fit: it needs" in done.stderr and "the largest part is gradients" in done.stderr
    assert "the fastest settings of each layout that fits" in done.stdout
    one = ("rollout.engine_tp=1", "rollout.engine_memory_fraction=0.4")
    assert "Raise rollout.engine_tp" in refused("rl_qwen2.5_32b_h200x8", "h200x8", *one)
    both = ("memory.offload_idle=false", "rollout.engine_memory_fraction=0.9")
    assert "set memory.offload_idle" in refused("rl_qwen2.5_32b_h200x8", "h200x8", *both)
    sync = ("rollout.precision=model", "rollout.engine_memory_fraction=0.9")
    assert "the weight sync does not fit" in refused("rl_qwen2.5_32b_lora_h100x1", "h100x1", *sync)


def test_json_has_the_same_numbers():
    words = ("--hardware", "h200x16", "--mean-tokens", "3000", "sandbox.workers=1", "--json")
    tree = json.loads(command("rl_qwen2.5_7b_h200x8.toml", *words).stdout)
    assert (tree["hardware"], tree["dp"], tree["fits"]) == ("h200x16", 16, True)
    assert tree["tokens_per_step"] == 512 * 16 * 3000
    assert tree["step_s"] == pytest.approx(sum(tree["phases_s"].values()))
    assert tree["total_hours"] == pytest.approx(tree["step_s"] * 400 / 3600)
    assert tree["train_gib"]["total"] == pytest.approx(sum(v for k, v in tree["train_gib"].items() if k != "total"))
    steps = [proposal["step_s"] for proposal in tree["proposals"]]
    assert len(steps) == 5 and steps == sorted(steps)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--like", "x", "--mean-tokens", "5"), "--like x and --mean-tokens 5 both set the lengths"),
        (("--hardware", "h200x2", "parallel.tp=4"), "= 4 does not divide the 2 devices of h200x2 that train"),
        (
            ("--hardware", "h200x2", "parallel.tp=1", "rollout.engine_tp=4"),
            "rollout.engine_tp = 4 is more than the 2 d",
        ),
        (("--hardware", "b300x8"), "Write a device and a number, for example h100x16"),
        (("--hardware", "h100x0"), "Write a device and a number, for example h100x16"),
    ],
)
def test_what_cannot_be_planned_is_one_error(words: tuple[str, ...], message: str):
    done = command("rl_qwen2.5_7b_h200x8.toml", *words)
    assert done.exit_code == 2 and message in done.stderr and not done.stdout


def test_the_report_has_the_numbers_of_its_plans():
    shape = PUBLISHED["Qwen3-30B-A3B"]
    settings = ("sandbox.workers=1", "train.stall_s=100")
    plan, other = (
        make_plan(rl("rl_qwen3_30b_a3b_h200x8", *settings, f"parallel.ep={ep}"), shape, H200) for ep in (8, 4)
    )
    assert plan.rollout and plan.sandbox
    _, memory, time, sandbox, notes, table = report(plan.config, shape, H200, plan, [other]).split("\n\n")
    t, r, s = plan.train, plan.rollout, plan.sandbox
    parts = {f"training {name.replace('_', ' ')}": value for name, value in asdict(t).items() if value}
    parts |= {"training idle engine": r.asleep, "training total": t.total + r.asleep, "sync total": r.syncing}
    parts |= {"rollout engine weights": r.weights, "rollout KV cache": r.kv_cache, "rollout idle actor": r.training}
    parts |= {"rollout engine buffers": r.beyond, "rollout total": r.total}
    lines = re.findall(r"^  (\w+) +([\w ]*\w) +([\d.]+)", memory, re.MULTILINE)
    assert {f"{kind} {name}": float(gib) for kind, name, gib in lines} == pytest.approx(parts, abs=0.051)
    assert f"KV cache for {r.kv_tokens:,} tokens per engine" in memory
    seconds = {name: float(value) for name, value in re.findall(r"^  ([\w ]*\w) +([\d.]+)", time, re.MULTILINE)}
    longest, steps = {"longest without progress": plan.longest_part[1]}, plan.config.train.steps
    assert seconds == pytest.approx(plan.phases | {"step": plan.step_s} | longest, abs=0.051)
    assert f"{steps} steps: {plan.step_s * steps / 3600:,.1f} hours" in time
    load = f"{s.calls_per_s:.0f} calls/s during rollouts keep {s.cores_per_node:.1f} cores per node busy"
    wanted = f"recommended: sandbox.workers = {s.workers_per_node}\nwarning: sandbox.workers = 1 is lower"
    assert sandbox == f"sandbox: {load}; {wanted}"
    assert "train.stall_s = 100 would end the run" in plan.stall_problem
    assert f"warning: {plan.stall_problem}" in notes
    _, first, second = table.splitlines()
    assert first.split()[:5] == [f"{plan.step_s:.1f}", "s", "configured", f"{plan.need_gib:.1f}", "GiB"]
    change = f"{other.step_s / plan.step_s - 1:+.1%}"
    assert second.split()[:5] == [f"{other.step_s:.1f}", "s", change, f"{other.need_gib:.1f}", "GiB"]
    assert "tp 1 pp 1 cp 1 dp 8 ep 8 etp 1, recompute full, " in first and "dp 8 ep 4 etp 1, " in second
