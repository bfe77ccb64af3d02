"""The planner: lengths, caches, limits, and `retool plan` as a command."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import pytest

from retool_mcore.config import RlConfig, SftConfig, load_run
from retool_mcore.errors import ConfigError
from retool_mcore.model.files import shape_of_model
from retool_mcore.model.shape import PUBLISHED
from retool_mcore.planner.generation import Engines
from retool_mcore.planner.hardware import GIB, hardware_of_run, parse
from retool_mcore.planner.lengths import Lengths, lengths_of_rows, lengths_of_run_dir
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.report import _duration, refusal, report
from tests.unit.planner.plans import CONFIGS, ROOT, SEVEN, THIRTY_TWO, command, rl, sft


def test_a_short_run_is_not_0_hours():
    assert [_duration(seconds) for seconds in (7.4, 90, 5400)] == ["7 seconds", "1.5 minutes", "1.5 hours"]


def test_a_plan_has_the_lengths_of_a_previous_run_of_its_kind(tmp_path: Path):
    run = rl("rl_qwen2.5_7b_h200x8")
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl with a step"):
        lengths_of_run_dir(tmp_path, run)
    steps = json.loads((ROOT / "perf/baselines/rl_7b_h200x2.NVIDIA_H200x2.json").read_text(encoding="utf-8"))["steps"]
    lines = [{"step": 0, "val-core/math/acc/mean@8": 0.5}, *steps]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = lengths_of_run_dir(tmp_path, run)
    tokens = sum(step["perf/total_num_tokens"] for step in steps) / len(steps)
    assert found.sequence == pytest.approx(tokens / 128, rel=0.001) and found.calls == 2
    assert f"{len(steps)} steps" in found.note and str(tmp_path) in found.note
    file.write_text('{"step": 1, "perf/total_num_tokens": 83081.0, "loss": 0.5}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="Give an RL run"):
        lengths_of_run_dir(tmp_path, run)
    (tmp_path / "config.toml").write_text((CONFIGS / "rl_tiny_cpu.toml").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ConfigError, match="Give a run of the same kind"):
        lengths_of_run_dir(tmp_path, sft())
    (tmp_path / "config.toml").write_text((CONFIGS / "sft_tiny_cpu.toml").read_text(encoding="utf-8"), encoding="utf-8")
    rows = [{"step": step, "perf/total_num_tokens": 32_000 * step} for step in (1, 2)]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    assert lengths_of_run_dir(tmp_path, sft("train.global_batch=64")).mean == 1500, (
        "32 rows a step, by the settings of that run"
    )


def row(scale: float, **more: float) -> dict[str, float]:
    names = ("prompt_length/mean", "response_length/min", "response_length/mean", "response_length/max")
    return {name: scale * value for name, value in zip(names, (10, 2, 20, 50), strict=True)} | more


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


def test_a_cache_that_is_held_to_a_number_of_tokens_takes_their_memory_alone():
    """Each of the two GPUs of an engine holds half of the heads. The share remains the limit."""
    both = "rollout.engine_tp=2"
    settings = ("rollout.engine_args={max_total_tokens=100000}", "rollout.engine_args={max_total_tokens=1000000000}")
    runs = [rl("rl_qwen2.5_7b_h200x8", both, *more) for more in ((), *((each,) for each in settings))]
    free, held, beyond = (make_plan(run, SEVEN, parse("h200x8")).rollout for run in runs)
    assert free and held and beyond
    assert held.kv_cache == pytest.approx(100_000 * 57_344 / 2 / GIB) and held.kv_tokens == 100_000
    assert held.total == pytest.approx(free.total - free.kv_cache + held.kv_cache)
    assert beyond == free


def test_an_engine_of_more_devices_than_there_are_is_refused():
    config = rl("rl_qwen2.5_7b_h200x8", "rollout.engine_tp=4", "parallel.tp=1")
    with pytest.raises(ConfigError, match=r"rollout\.engine_tp = 4 is more than the 2 devices of h200x2"):
        make_plan(config, SEVEN, parse("h200x2"))


@pytest.mark.parametrize("name", ["b300x8", "h100x0"])
def test_unknown_hardware(name: str):
    with pytest.raises(ConfigError, match="Write a device and a number, for example h100x16"):
        parse(name)


def test_the_hardware_of_a_run_is_in_its_name_and_fits_its_cluster():
    named = ("run.platform=cuda", "run.name=mine_h100x2", "cluster.gpus_per_node=2")
    assert hardware_of_run(rl("rl_tiny_cpu", *named)) == parse("h100x2")
    for other in ("run.platform=cpu", "cluster.gpus_per_node=4", "run.name=h100x2b"):
        with pytest.raises(ConfigError, match=r"neither the file's name nor run\.name contains the GPU to plan for"):
            hardware_of_run(rl("rl_tiny_cpu", *named, other))
    assert [parse("H100x16").link(ranks) for ranks in (8, 9)] == [450e9, 50e9], "within a node, and beyond it"


def test_a_cache_in_fp8_holds_twice_the_tokens_and_is_read_in_the_same_time():
    """Where the cache limits how many responses run at once, twice as many do."""
    fp8 = ("rollout.kv_cache=fp8", "algorithm.importance_sampling=token")
    tight = ("rollout.engine_memory_fraction=0.2", "rollout.max_running_requests=1024")
    runs = [rl("rl_qwen2.5_7b_h200x8", *tight, *words) for words in ((), fp8)]
    h200, lengths = parse("h200x8"), Lengths.evenly(8000, 16_000)
    plans = [make_plan(run, SEVEN, h200, lengths=lengths) for run in runs]
    plain, halved = (plan.rollout for plan in plans)
    assert plain and halved and halved.kv_cache == plain.kv_cache, "the same memory"
    assert halved.kv_tokens == pytest.approx(2 * plain.kv_tokens, abs=1)
    tokens = (plain.kv_tokens, halved.kv_tokens)
    engines = [Engines.of(run, SEVEN, h200, each, lengths) for run, each in zip(runs, tokens, strict=True)]
    (few, limit), (many, _) = (each.slots for each in engines)
    assert limit == "the size of the KV cache" and many == pytest.approx(2 * few, rel=0.001)
    assert plans[1].phases["generate"] < 0.85 * plans[0].phases["generate"], "weights are read half as often"
    steps = [each.step_s(64.0, 64 * 8000.0) for each in engines]
    assert steps[0] == steps[1], "no faster by it, as was measured with Triton"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_qwen*.toml")), ids=lambda path: path.stem)
def test_every_shipped_run_outlives_its_longest_planned_part(path: Path):
    run = load_run(str(path))
    assert isinstance(run, SftConfig | RlConfig)
    plan = make_plan(run, shape_of_model(run.model.path), hardware_of_run(run))
    assert plan.stall_problem == ""
    assert plan.longest_part[1] <= plan.step_s


def test_the_report_warns_of_a_limit_below_a_planned_part():
    """32B on 8 H200: the pass for old log-probabilities is the longest part of a step."""
    plan = make_plan(rl("rl_qwen2.5_32b_h200x8", "train.stall_s=1000"), THIRTY_TWO, parse("h200x8"))
    assert plan.longest_part == ("the pass for old log-probabilities", plan.phases["old_log_prob"])
    lines = report(plan.config, THIRTY_TWO, parse("h200x8"), plan, [])
    assert "warning: train.stall_s = 1000 would end the run" in lines
    assert f"at least {math.ceil(2 * plan.longest_part[1])}" in lines


def test_what_cannot_fit_is_refused_and_by_how_much():
    done = command("configs/sft_qwen2.5_32b_h200x8.toml", "parallel.tp=1")
    assert done.returncode == 2
    assert "training does not fit: it needs" in done.stderr and "the largest part is gradients" in done.stderr
    assert "the fastest settings of each layout that fits" in done.stdout
    one = rl("rl_qwen2.5_32b_h200x8", "rollout.engine_tp=1", "rollout.engine_memory_fraction=0.4")
    plan = make_plan(one, THIRTY_TWO, parse("h200x8"))
    assert "Raise rollout.engine_tp" in refusal(plan, parse("h200x8"))
    assert plan.rollout and plan.missing_gib == -plan.rollout.kv_cache > 0 and not plan.fits
    both = rl("rl_qwen2.5_32b_h200x8", "memory.offload_idle=false", "rollout.engine_memory_fraction=0.9")
    assert "set memory.offload_idle" in refusal(make_plan(both, THIRTY_TWO, parse("h200x8")), parse("h200x8"))


def test_json_has_the_same_numbers():
    words = ("--hardware", "h200x16", "--mean-tokens", "3000", "sandbox.workers=1", "--json")
    tree = json.loads(command("configs/rl_qwen2.5_7b_h200x8.toml", *words).stdout)
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
    ],
)
def test_what_cannot_be_planned_is_one_error(words: tuple[str, ...], message: str):
    done = command("configs/rl_qwen2.5_7b_h200x8.toml", *words)
    assert done.returncode == 2 and message in done.stderr and not done.stdout


def test_the_report_has_the_numbers_of_its_plans():
    shape, h200 = PUBLISHED["Qwen3-30B-A3B"], parse("h200x8")
    runs = [rl("rl_qwen3_30b_a3b_h200x8", "sandbox.workers=1", f"parallel.ep={ep}") for ep in (8, 4)]
    plan, other = (make_plan(run, shape, h200) for run in runs)
    assert plan.rollout and plan.sandbox
    _, memory, time, sandbox, *_, table = report(plan.config, shape, h200, plan, [other]).split("\n\n")
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
    _, first, second = table.splitlines()
    assert first.split()[:5] == [f"{plan.step_s:.1f}", "s", "configured", f"{plan.need_gib:.1f}", "GiB"]
    change = f"{other.step_s / plan.step_s - 1:+.1%}"
    assert second.split()[:5] == [f"{other.step_s:.1f}", "s", change, f"{other.need_gib:.1f}", "GiB"]
    assert "tp 1 pp 1 cp 1 dp 8 ep 8 etp 1, recompute full, " in first and "dp 8 ep 4 etp 1, " in second
