"""The planner's arithmetic against hand calculations and published sizes."""

import json
import math
from pathlib import Path

import pytest

from retool_mcore.config import Memory, Parallel, RlConfig, SftConfig, load_run
from retool_mcore.config.lora import Lora
from retool_mcore.errors import ConfigError
from retool_mcore.model.files import shape_of_model
from retool_mcore.model.shape import PUBLISHED, shape_of_config
from retool_mcore.planner.generation import Engines
from retool_mcore.planner.hardware import GIB, hardware_of_run, parse
from retool_mcore.planner.lengths import Lengths, lengths_of_run_dir
from retool_mcore.planner.memory import activation_bytes, train_memory
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.report import _duration, report
from tests.unit.planner.plans import CONFIGS, ROOT, SEVEN, THIRTY_TWO, rl, sft


def test_a_short_run_is_not_0_hours():
    assert [_duration(seconds) for seconds in (7.4, 90, 5400)] == ["7 seconds", "1.5 minutes", "1.5 hours"]


def test_lengths_by_hand():
    """Half of the mean's way up is even; a third of it puts few at the top."""
    even = Lengths(shortest=1000, mean=2000, longest=3000, prompt=100, limit=3000)
    assert even.quantiles(4) == [1250, 1750, 2250, 2750]
    assert even.spread == pytest.approx((2100**2 + 2000**2 / 12) / 2100**2)
    assert even.context == pytest.approx(100 + (2000**2 + 2000**2 / 12) / 2 / 2000)
    few = Lengths(shortest=0, mean=1000, longest=3000, limit=3000)
    assert few.quantiles(1000)[500] == pytest.approx(3000 / 4, rel=0.01)
    assert sum(few.quantiles(1000)) / 1000 == pytest.approx(1000, rel=0.001)
    same = Lengths(shortest=500, mean=500, longest=500, limit=500)
    assert same.quantiles(3) == [500] * 3 and same.spread == 1.0


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


def test_a_tokens_flops_are_those_that_mfu_counts():
    config = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
              "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
    assert shape_of_config(config).train_flops([1], Lora()) == pytest.approx(
        6 * SEVEN.compute_params + 6 * 28 * 28 * 128
    )


def test_a_token_in_the_cache_by_hand():
    """A key and a value, 2 bytes each, of every layer and key-value head."""
    assert SEVEN.kv_bytes(fp8=False) == 2 * 28 * 4 * 128 * 2 == 57_344
    assert THIRTY_TWO.kv_bytes(fp8=False) == 2 * 64 * 8 * 128 * 2 == 262_144
    config = rl("rl_qwen2.5_7b_h200x8", "memory.offload_idle=true", "rollout.engine_memory_fraction=0.8")
    rollout = make_plan(config, SEVEN, parse("h200x8")).rollout
    assert rollout is not None
    assert rollout.kv_cache == pytest.approx(0.8 * (139.8 - 3.7) - 2 * 7.61e9 / GIB, rel=0.01)
    assert rollout.kv_tokens == pytest.approx(rollout.kv_cache * GIB / 57_344, abs=1)


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


def test_states_of_32b_by_hand():
    """TP 8, one replica: 6 bytes of weight and gradient and 12 of Adam a parameter, an eighth each:
    73.7 GB.
    """
    found = train_memory(THIRTY_TWO, Parallel(tp=8), Memory(), dp=1, micro_batch_tokens=0)
    assert (found.weights + found.gradients + found.optimizer) * GIB == pytest.approx(73.7e9, rel=0.01)
    two = train_memory(THIRTY_TWO, Parallel(tp=4), Memory(), dp=2, micro_batch_tokens=0)
    assert (two.weights + two.gradients + two.optimizer) * GIB == pytest.approx(98.3e9, rel=0.01)
    context = train_memory(THIRTY_TWO, Parallel(tp=4, cp=2), Memory(), dp=1, micro_batch_tokens=0)
    assert context.optimizer == two.optimizer, "context-parallel ranks shard the states, too"


@pytest.mark.parametrize("layout", [Parallel(ep=8), Parallel(tp=2, ep=8, etp=1)], ids=str)
def test_states_of_experts_by_hand(layout: Parallel):
    """Qwen3-30B-A3B, 8 devices, EP 8: an eighth of 29.0 G parameters of experts on each, and all
    1.5 G others, or TP's half.

    No other device holds the same experts, so their 12 bytes of Adam are whole; those of the others
    are an eighth.
    """
    experts, others = 48 * 128 * (3 * 2048 * 768 + 2048), 48 * 2048 * 128 * 2 * 36 + 2 * 2048 * 151936
    found = train_memory(PUBLISHED["Qwen3-30B-A3B"], layout, Memory(), dp=8 // layout.tp, micro_batch_tokens=0)
    assert (found.weights + found.gradients) * GIB == pytest.approx(6 * (experts / 8 + others / layout.tp))
    assert found.optimizer * GIB == pytest.approx(12 * (experts / 8 + others / 8))


def test_activations_by_hand():
    """One layer of 7B keeps 2 h, q, the attention's output, k, v and 3 f for each token, in
    bfloat16.
    """
    kept, working = activation_bytes(SEVEN, Memory(), 1)
    assert (kept, working) == (2 * (2 * 3584 + 2 * 3584 + 2 * 512 + 3 * 18944), 0.0)
    full, again = activation_bytes(SEVEN, Memory(recompute="full"), 2)
    assert (full, again) == (3584, kept / 2)
    plain, _ = activation_bytes(SEVEN, Memory(), 1, fused=False)
    assert plain - kept == 2 * (18944 + 4 * 3584)
    selective, _ = activation_bytes(SEVEN, Memory(recompute="selective"), 1, fused=False)
    assert plain - selective == 2 * 2 * 3584


def test_the_engines_own_log_probabilities_cost_no_pass():
    words = ("train.mini_batch_prompts=512",)
    actor = make_plan(rl("rl_qwen2.5_7b_h200x8", *words), SEVEN, parse("h200x8")).phases
    rollout = make_plan(rl("rl_qwen2.5_7b_h200x8", *words, "algorithm.old_log_prob=rollout"), SEVEN, parse("h200x8"))
    assert rollout.phases == {name: seconds for name, seconds in actor.items() if name != "old_log_prob"}


def test_an_engine_of_more_devices_than_there_are_is_refused():
    config = rl("rl_qwen2.5_7b_h200x8", "rollout.engine_tp=4", "parallel.tp=1")
    with pytest.raises(ConfigError, match=r"rollout\.engine_tp = 4 is more than the 2 devices of h200x2"):
        make_plan(config, SEVEN, parse("h200x2"))


@pytest.mark.parametrize("name", ["b300x8", "h100x0"])
def test_unknown_hardware(name: str):
    with pytest.raises(ConfigError, match="Write a device and a number, for example h100x16"):
        parse(name)


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


def test_a_limit_below_a_planned_part_is_told_with_what_would_do():
    """32B on 8 H200: the pass for old log-probabilities is the longest part of a step."""
    plan = make_plan(rl("rl_qwen2.5_32b_h200x8", "train.stall_s=1000"), THIRTY_TWO, parse("h200x8"))
    part, seconds = plan.longest_part
    assert part == "the pass for old log-probabilities" and 1000 < seconds == plan.phases["old_log_prob"]
    assert seconds > plan.parts["an update"] == plan.phases["update"] / 8
    assert "would end the run" in plan.stall_problem and f"at least {math.ceil(2 * seconds)}" in plan.stall_problem
    close = make_plan(rl("rl_qwen2.5_32b_h200x8", "train.stall_s=2000"), THIRTY_TWO, parse("h200x8"))
    assert "leaves less than 2 times that" in close.stall_problem
    off = make_plan(rl("rl_qwen2.5_32b_h200x8", "train.stall_s=0"), THIRTY_TWO, parse("h200x8"))
    assert off.stall_problem == ""
    assert "warning: train.stall_s = 1000 would end the run" in report(
        plan.config, THIRTY_TWO, parse("h200x8"), plan, []
    )


def test_each_group_of_ranks_on_npus_keeps_what_its_library_buffers():
    """Two buffers of 200 MB: for all ranks, tp, pp and dp here, and twice in an engine of two."""
    train = {"parallel": Parallel(tp=8, pp=2), "memory": Memory(), "dp": 2, "micro_batch_tokens": 0}
    plain, grouped = (train_memory(THIRTY_TWO, **train, group_gib=gib).buffers for gib in (0.0, 0.4))
    assert grouped - plain == pytest.approx(4 * 0.4)
    alone = train_memory(SEVEN, Parallel(), Memory(), dp=1, micro_batch_tokens=0, group_gib=0.4)
    assert alone.buffers == plain, "one device has nobody to talk to"
    two, one = (rl("rl_qwen2.5_7b_a2x8", f"rollout.engine_tp={tp}") for tp in (2, 1))
    plans = [make_plan(each, SEVEN, parse("a2x8")) for each in (two, one)]
    asleep = [plan.rollout.asleep for plan in plans if plan.rollout]
    assert asleep[0] - asleep[1] == pytest.approx(2 * 0.4)
    assert plans[0].training_gib == pytest.approx(plans[0].train.total + asleep[0])
