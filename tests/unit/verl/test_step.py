"""A step of each mode: the order of its parts, what each part gets, and where a run may end."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RolloutError
from retool_mcore.run import checkpoint
from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.signals import EndedBySignal
from tests.unit.verl.loss_scenario import (
    ENGINE_BT,
    KEYS,
    MASK_BT,
    OLD_BT,
    RL,
    Queue,
    batch,
    learning_trainer,
    scores,
    trained_on,
)

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
TRAINERS = {"sync": "ReToolTrainer", "partial_rollout": "ReToolPartialRolloutTrainer", "async": "ReToolAsyncTrainer"}
MODES = {"sync": (), "partial_rollout": ("train.mode=partial_rollout",),
         "async": ("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1")}  # fmt: skip
ENGINES = ("abort_replicas", "sleep_replicas", "update_weights", "resume_generation_replicas")


class Run:
    """Our trainer of a mode without models, engines and queue; ``calls`` lists what it called.

    A step changes ``weights`` and consumes the oldest prompt of ``queue``; ``given`` counts the
    prompts that the data loader gave, one a step. In the modes with prompts in flight, one is in
    the queue before the first step, and enough for all steps if a step has several ``batches``.
    ``at(part, step)`` is called in each part.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, mode: str, batches: int) -> None:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        from retool_mcore.verl import step as module

        kind: Any = getattr(module, TRAINERS[mode])
        self.trainer: Any = object.__new__(kind)
        self.weights, self.calls, self.copies = [0], list[str](), list[str]()
        first = 0 if mode == "sync" else 1
        self.queue, self.state = [1][:first] if batches == 1 else list(range(40)), {"given": first}
        self.at: Callable[[str, int], None] = lambda part, step: None
        trainer = self.trainer
        words = [f"run.root={folder}", "train.steps=9", "checkpoint.every_steps=4", *MODES[mode], *settings]
        trainer._run = load_config(RlConfig, RL, words)
        trainer._run.run.dir.mkdir(parents=True)
        trainer.config = SimpleNamespace(
            data=SimpleNamespace(train_batch_size=12 * batches),
            algorithm={},
            trainer=SimpleNamespace(test_freq=-1, critic_warmup=0),
        )
        trainer._saver = checkpoint.Saver(trainer._run, trainer._write_checkpoint)
        trainer.global_steps, trainer.total_training_steps, trainer.trainer_mode = 0, 9, kind.verl_mode
        trainer.parameter_sync_step, trainer.updates_per_batch = batches, 1
        trainer.timing_raw, trainer.local_trigger_step = {}, 0
        trainer.use_critic, trainer.use_reference_policy = False, False
        trainer.curr_step_profile = trainer.prev_step_profile = False
        trainer.hybrid_rollout_config = SimpleNamespace(enable_switch=False)
        trainer.current_mode, trainer._step_sample_wait_seconds = None, 0.0
        trainer.tokenizer, trainer._writer = SimpleNamespace(eos_token_id=0), None
        trainer.collect_engine_load = lambda: None
        trainer._saved_groups = list
        trainer.detach_dead_engines, trainer.restart_lost_engines = lambda: None, list
        trainer.admit_engines = trainer.sleep_engines = lambda engines: None
        trainer.replace_dead_engines = trainer.compare_weights = lambda: None
        trainer.checkpoint_manager = SimpleNamespace(**{name: self.note(name) for name in ENGINES})
        trainer.standalone_checkpoint_manager = trainer.checkpoint_manager
        trainer.actor_rollout_wg = SimpleNamespace(
            save_model_to_cpu=lambda n: self.copies.append(f"save {n}"),
            restore_model_from_cpu=lambda n: self.copies.append(f"restore {n}"),
            clear_cpu_model=lambda n: None,
        )
        trainer.replay_buffer = SimpleNamespace(sample=self._sample, while_waiting=trainer.while_sampling)
        trainer.train_dataloader = SimpleNamespace(state_dict=lambda: self.state)  # the same object, as it changes
        monkeypatch.setattr(module, "upsample_batch_to_divisible_size", lambda rows, multiple, eos: rows)
        monkeypatch.setattr(module, "mismatch_metrics", lambda rows: {})
        monkeypatch.setattr(PPOTrainer, "fit", self._fit)
        monkeypatch.setattr(PPOTrainer, "prepare_step", lambda trainer: self._submit() or {})
        monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda trainer: self._save())
        for part in ("old_log_prob", "ref_log_prob", "values", "advantage"):
            monkeypatch.setattr(PPOTrainer, f"_compute_{part}", self._part(part))
        for role in ("critic", "actor"):
            monkeypatch.setattr(PPOTrainer, f"_update_{role}", self._part(role, updates=True))

    def note(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.calls.append(name)

    def _part(self, name: str, *, updates: bool = False) -> Callable[..., Any]:
        def part(trainer: Any, rows: Any, metrics: dict[str, Any]) -> Any:
            self.calls.append(name)
            self.at(name, trainer.global_steps)
            if updates:
                self.weights.append(trainer.global_steps)
            return rows

        return part

    def _submit(self) -> None:
        self.state["given"] += 1
        self.queue.append(self.state["given"])
        self.calls.append(f"submit {self.trainer.global_steps}")

    def _sample(self, step: int, partition: str, prompts: int) -> tuple[Any, dict[str, int]]:
        assert (step, partition, prompts) == (self.trainer.global_steps, "train", 12)
        self.calls.append("sample")
        for _ in range(5):
            self.at("sample", step)
            self.trainer.replay_buffer.while_waiting()
        self.queue.pop(0)
        rows = batch()
        rows.tags = [{"seq_len": 5} for _ in rows.keys]
        return rows, {"rollout/dropped": 0, "rollout/refilled_prompts": 0}

    def _save(self) -> None:
        trainer = self.trainer
        folder = checkpoint.step_folder(trainer._run, trainer.global_steps)
        self.calls.append(f"save {trainer.global_steps}")
        (folder / "actor").mkdir()
        (folder / "actor/weights").write_text(str(self.weights))
        torch.save(trainer.train_dataloader.state_dict(), folder / "data.pt")
        torch.save(self.queue, folder / "queue.pt")

    def _fit(self, agent_loop_manager: Any, count: int = 9) -> None:
        trainer = self.trainer
        for step in range(1, count + 1):
            trainer.global_steps = step
            trainer.step({}, trainer.timing_raw)
            if step % 4 == 0:
                trainer._save_checkpoint()
            trainer.on_step_end()

    def steps(self, count: int) -> list[str]:
        """The calls of ``count`` steps."""
        self._fit(None, count)
        return self.calls

    def signalled(self, part: str, step: int, number: int = signal.SIGTERM, batch: int = 0) -> EndedBySignal:
        """The end of a run that gets a signal in a part of a step's batch."""

        def send(at: str, at_step: int) -> None:
            now = (at, at_step, self.trainer.local_trigger_step)
            if now == (part, step, batch) and not self.trainer._ending.first_signal:
                os.kill(os.getpid(), number)
                while not self.trainer._ending.first_signal:
                    time.sleep(0.001)

        self.at = send
        with pytest.raises(EndedBySignal) as caught:
            self.trainer.fit(SimpleNamespace(pop_drop_causes=Counter))
        return caught.value

    def saved(self) -> tuple[int, str, int]:
        """Of the newest checkpoint: step, weights, and how many prompts the loader had given."""
        newest = complete_checkpoints(self.trainer._run.run.dir / "checkpoints")[-1]
        given = torch.load(newest.path / "data.pt")["given"]
        return newest.step, (newest.path / "actor/weights").read_text(), given


NewRun = Callable[..., Run]


@pytest.fixture
def new_run(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> NewRun:
    def make(*settings: str, mode: str = "sync", batches: int = 1) -> Run:
        return Run(tmp_path_factory.mktemp("run"), monkeypatch, settings, mode, batches)

    return make


LEARN = ["old_log_prob", "advantage", "actor"]


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [
        ("sync", ["sleep_replicas"], ["update_weights"]),
        ("partial_rollout", ["abort_replicas", "sleep_replicas"], ["update_weights", "resume_generation_replicas"]),
    ],
)
def test_engines_sleep_while_a_step_learns(new_run: NewRun, mode: str, before: list[str], after: list[str]):
    """In mode "sync" the next step's prompts are submitted right after the weights."""
    run, step = new_run(mode=mode), ["sample", *before, *LEARN, *after]
    calls = ["submit 1", *step, "submit 2", *step]
    assert run.steps(2) == (calls if mode == "partial_rollout" else [*calls, "submit 3"])
    assert run.trainer.engine_version == 2, "a restarted engine gets the weights under this version"


def test_a_step_looks_for_dead_engines_and_admits_new_ones_with_the_weights(new_run: NewRun):
    run, looks = new_run(), list[str]()
    run.trainer.replace_dead_engines = lambda: looks.append("for dead engines")
    before = ["detach_dead_engines", "restart_lost_engines", "sleep_engines"]
    after = ["admit_engines", "compare_weights"]
    for name in (*before, *after, "collect_engine_load"):
        setattr(run.trainer, name, run.note(name))
    run.trainer._saver.poll = run.note("publish")
    run.queue = [1]
    run.trainer.on_step_begin()
    run.trainer.sample({})
    sampled = ["publish", "sample", "collect_engine_load", "detach_dead_engines", "sleep_replicas"]
    assert run.calls == sampled and len(looks) == 5, "at each of five polls"
    run.trainer.on_step_end()
    assert run.calls[5:] == [*before, "update_weights", *after, "submit 1"], "the sync expects sleeping engines"


def test_a_validation_has_the_engines_for_itself(new_run: NewRun):
    run = new_run()
    run.trainer.config.trainer.test_freq = 2
    calls = run.steps(2)
    assert calls[-1] == "update_weights" and calls.count("submit 2") == 1, "step 3 submits its prompts itself"
    run = new_run()
    run.trainer.total_training_steps = 2
    assert run.steps(2)[-1] == "update_weights", "no step follows the last one"


def test_an_asynchronous_step_samples_and_learns_for_each_update(new_run: NewRun):
    """Its engines never sleep, and one weight sync ends the step."""
    run = new_run("train.mini_batch_prompts=6", mode="async", batches=2)
    assert run.steps(1) == ["submit 1", *(["sample", *LEARN] * 2), "update_weights"]
    assert run.copies == ["save 0", "save 1", "restore 0", "restore 1"], "both batches compare with the step's start"


def test_reference_and_critic_run_between_the_actors_pass_and_its_update(new_run: NewRun):
    from retool_mcore.verl.trainer import PHASES

    run = new_run()
    run.trainer.use_reference_policy = run.trainer.use_critic = True
    run.trainer.config.trainer.critic_warmup = 2  # verl's first step that trains the actor
    parts = [call for call in run.steps(2) if call not in ("sample", "sleep_replicas", "update_weights")]
    both = ["old_log_prob", "ref_log_prob", "values", "advantage", "critic"]
    assert parts == ["submit 1", *both, "submit 2", *both, "actor", "submit 3"]
    assert run.trainer.timing_raw.keys() >= {*PHASES} - {"reward", "save_checkpoint"}, "or their time counts as other"


def test_rows_are_learned_from_in_an_order_that_does_not_hang_on_who_finished_first(new_run: NewRun):
    trainer = new_run().trainer

    def order(keys: list[str], step: int = 0, number: int = 0) -> list[str]:
        trainer.global_steps, trainer.local_trigger_step = step, number
        rows = batch(keys)
        rows.tags = [{"seq_len": 5} for _ in keys]
        return trainer.assign(rows, {}).keys

    first = order(["b_10_0", "b_2_0", "a_0_0"])
    assert order(["a_0_0", "b_2_0", "b_10_0"]) == first and sorted(first) == ["a_0_0", "b_10_0", "b_2_0"]
    assert first.index("b_2_0") < first.index("b_10_0"), "sessions are numbers"
    assert len({str(order(KEYS, step=step)) for step in range(8)}) > 1, "each step draws its own order"
    assert len({str(order(KEYS, number=number)) for number in range(8)}) > 1, "and each batch of it"


# ---------------------------------------------------------------- ending on request


@pytest.mark.parametrize(("part", "kept"), [("sample", 5), ("advantage", 5), ("actor", 6)])
def test_a_step_without_an_update_is_stopped_and_another_is_finished(new_run: NewRun, part: str, kept: int):
    run = new_run()
    ended = run.signalled(part, 6)
    assert run.saved() == (kept, str(list(range(kept + 1))), kept), "prompts of the stopped step are given again"
    assert ended.code == 143 and f"step {kept} is saved" in ended.message
    assert run.calls.count(f"save {kept}") == 1
    if part == "sample":
        assert run.calls[-3:] == ["abort_replicas", "sleep_replicas", "save 5"], "a save needs the engines' devices"


@pytest.mark.parametrize(("part", "kept"), [("values", 2), ("critic", 3)])
def test_the_critics_update_is_the_first_one(new_run: NewRun, part: str, kept: int):
    """The actor's update follows its critic's."""
    run = new_run()
    run.trainer.use_critic = True
    run.signalled(part, 3)
    assert run.saved() == (kept, str([0, 1, 1, 2, 2, 3, 3][: 2 * kept + 1]), kept)


@pytest.mark.parametrize("mode", ["partial_rollout", "async"])
@pytest.mark.parametrize(("part", "kept"), [("sample", 5), ("old_log_prob", 6)])
def test_no_prompt_in_flight_is_lost(new_run: NewRun, mode: str, part: str, kept: int):
    """What the loader gave was learned from or is in the queue that is saved.

    A step that has taken its batch out of the queue is finished.
    """
    run = new_run(mode=mode)
    run.signalled(part, 6)
    step, weights, given = run.saved()
    queue = torch.load(run.trainer._run.run.dir / f"checkpoints/global_step_{step}/queue.pt")
    assert (step, weights) == (kept, str(list(range(kept + 1))))
    assert [*range(1, kept + 1), *queue] == list(range(1, given + 1))
    at = run.calls.index(f"save {kept}")
    if part == "sample":
        assert (run.calls[at - 2 : at] == ["abort_replicas", "sleep_replicas"]) == (mode == "partial_rollout")


def test_between_the_updates_of_a_step_nothing_is_stopped(new_run: NewRun):
    """Mode "async" samples again within a step, when the weights are no step's any more."""
    run = new_run("train.mini_batch_prompts=6", mode="async", batches=2)
    ended = run.signalled("sample", 3, signal.SIGUSR1, batch=1)
    assert (ended.code, run.saved()[0]) == (143, 3)


# ------------------------------------------------------------------- prompts' names


def named(monkeypatch: pytest.MonkeyPatch, trainer: Any, steps: range) -> list[list[str]]:
    """The names of the prompts that each of ``steps`` submits itself, four a step."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    submitted: list[list[str]] = []

    def submit(trainer: Any) -> None:
        submitted.append([name for _ in range(2) for name in trainer._fetch_one_gen_batch()["uid"]])

    monkeypatch.setattr(PPOTrainer, "_fetch_one_gen_batch", lambda trainer: TensorDict({"raw": torch.zeros(2)}, 2))
    monkeypatch.setattr(PPOTrainer, "prepare_step", submit)
    for trainer.global_steps in steps:
        trainer.prepare_step()
    return submitted


def names_of_step(step: int) -> list[str]:
    return [f"00000{step}-0000{place}" for place in range(4)]


@pytest.mark.parametrize(
    ("restored", "submitted"),
    [
        ({}, [7, 8]),
        ({"000007-00011": {"is_prompt": True}}, [8]),
        ({"000006-00011": {"is_prompt": True}, "000007-00008_0_0": {"seq_len": 3}}, [7, 8]),
    ],
)
def test_a_resumed_run_names_its_prompts_like_the_unbroken_one_and_fetches_none_again(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, restored: dict[str, Any], submitted: list[int]
):
    """Step 7 begins. A checkpoint of step 6 has prompts of step 6 at most; one of a run that was
    ended in step 7 has those of step 7.
    """
    from retool_mcore.verl import trainer as module

    assert named(monkeypatch, new_run().trainer, range(1, 3)) == [names_of_step(1), names_of_step(2)]
    monkeypatch.setattr(module.tq, "kv_list", lambda partition: {"train": restored})
    trainer = new_run().trainer
    trainer.global_steps = 6
    trainer._find_restored_prompts()
    assert named(monkeypatch, trainer, range(7, 9)) == [names_of_step(step) for step in submitted]


# ---------------------------------------------------------------- what workers get


def test_a_batch_with_dropped_trajectories_is_padded_to_whole_updates(new_run: NewRun, monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import step as module

    def pad(rows: Any, multiple: int, eos: int) -> Any:
        raise StopIteration(multiple)

    run = new_run("train.mini_batch_prompts=6", "rollout.group_size=4")
    run.trainer.updates_per_batch = 2
    monkeypatch.setattr(module, "upsample_batch_to_divisible_size", pad)
    with pytest.raises(StopIteration, match=f"^{2 * 6 * 4}$"):
        run.trainer.step({}, {})


def test_a_mean_over_responses_divides_by_trajectories_and_not_by_padding(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
):
    """Two updates of four rows on two ranks; the second update lacks one trajectory of a group."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl.update_worker import KEEP_LOG_PROBS, REAL_ROWS

    run = new_run("cluster.gpus_per_node=2")
    run.trainer.updates_per_batch = 2
    rows = batch(["a_0_0", "a_1_0", "c_0_0", "pad_0_0", "b_0_0", "b_1_0", "c_1_0", "d_0_0"])  # in the ranks' order
    rows.tags[3] = {"is_padding": True}
    for role in ("critic", "actor"):
        monkeypatch.setattr(PPOTrainer, f"_update_{role}", lambda trainer, rows, metrics: rows)
        options = getattr(run.trainer, f"update_{role}")(rows, {}).extra_info
        assert options[REAL_ROWS] == (4, 3) and not options.get(KEEP_LOG_PROBS)


def test_with_the_engines_log_probs_the_mismatch_is_that_of_the_first_update(monkeypatch: pytest.MonkeyPatch):
    """The first update's weights have sampled. A later batch of mode "async" gets no metrics."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl.update_worker import KEEP_LOG_PROBS

    columns = {"responses": MASK_BT, "rollout_log_probs": ENGINE_BT}
    Queue(monkeypatch, response_mask=MASK_BT, old_log_probs=OLD_BT, **columns)
    keeps = {True: batch()}  # what an update that keeps its log-probabilities returns
    monkeypatch.setattr(PPOTrainer, "_update_actor", lambda trainer, rows, _: keeps[rows.extra_info[KEEP_LOG_PROBS]])
    size = ("train.prompts_per_step=2", "train.mini_batch_prompts=1")
    trainer = learning_trainer("algorithm.old_log_prob=rollout", *size)
    trainer.actor_rollout_wg = SimpleNamespace(log_probs_of_update=lambda rows: None)
    metrics: dict[str, Any] = {}
    trainer.update_actor(batch(), metrics)
    first_BT = MASK_BT[:2].bool()
    gap_N = (ENGINE_BT - OLD_BT)[:2][first_BT]
    assert metrics["rollout_corr/kl"] == pytest.approx(float(gap_N.mean()), abs=1e-6)
    assert metrics["mismatch/max"] == pytest.approx(float(gap_N.abs().max()), abs=1e-6)
    assert metrics["actor/entropy"] == pytest.approx(-float(OLD_BT[:2][first_BT].mean()), abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] > 0
    trainer.local_trigger_step, later = 1, dict[str, Any]()
    trainer.update_actor(batch(), later)
    assert later == {}


def test_a_step_of_several_batches_counts_all_of_them(new_run: NewRun):
    trainer, metrics = new_run(mode="async", batches=2).trainer, dict[str, Any]()
    batches = [
        {"rollout/dropped": 2, "rollout/refilled_prompts": 1, "actor/loss_tokens": 30.0, "actor/ppo_kl": 0.1},
        {"rollout/dropped": 5, "rollout/refilled_prompts": 0, "actor/loss_tokens": 10.0, "actor/ppo_kl": 0.3},
    ]
    trainer.sample = lambda of_batch: of_batch.update(batches.pop(0)) or batch()
    trainer.learn = lambda rows, of_batch: rows
    rows = trainer.step(metrics, {})
    assert Counter(rows.keys) == Counter([*KEYS, *KEYS])
    assert metrics["rollout/dropped"] == 7 and metrics["rollout/refilled_prompts"] == 1
    assert metrics["actor/loss_tokens"] == 40 and metrics["actor/ppo_kl"] == pytest.approx(0.2)


def test_a_reward_outside_of_the_loss_moves_to_the_last_token_in_the_loss(monkeypatch: pytest.MonkeyPatch):
    """A response that was cut inside a tool's output ends outside of the loss."""
    mask_BT = MASK_BT.clone()
    mask_BT[0, 1:] = 0  # of three tokens the last two are a tool's
    columns = {"response_mask": mask_BT, "rm_scores": scores(), "old_log_probs": OLD_BT}
    columns |= {"rollout_log_probs": ENGINE_BT, "values": torch.zeros(4, 6)}  # the values are of PPO's critic
    for name, learns in (("ppo", True), ("reinforce_plus_plus", True), ("grpo", False)):
        queue = Queue(monkeypatch, **columns)
        learning_trainer(f"algorithm.name={name}").compute_advantages(batch(), {})
        assert (float(queue.rows["a_0_0"]["rm_scores"][0]) == 1.0) is learns
        assert float(queue.rows["a_0_0"]["rm_scores"].sum()) == 1.0
    returns = queue.rows["a_0_0"]["advantages"]
    assert returns[0] != 0 and not returns[1:].any(), "GRPO spreads the sum over the tokens in the loss"


# ------------------------------------------------------------- nothing to learn from


def test_a_step_of_which_nothing_is_left_to_learn_from_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl.replay import require_learnable

    trainer = learning_trainer('algorithm.mask=["truncated"]')
    trainer.assign = lambda rows, metrics: rows
    Queue(monkeypatch, response_mask=torch.zeros_like(MASK_BT))
    with pytest.raises(RolloutError, match=r'step 3 has a token .*: algorithm\.mask = \["truncated"\] excluded all'):
        trainer.learn(batch(), {})
    Queue(monkeypatch, response_mask=MASK_BT * torch.tensor([[1], [0], [0], [0]]))
    rows = batch()
    rows.tags[3] = {"is_padding": True}
    assert require_learnable(rows, 3, "x") == pytest.approx(2 / 3), "of the three that are not padding"


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_rejection_of_everything_ends_the_run_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch):
    settings = (f"algorithm.name={name}", "algorithm.rejection=seq_max_k2", "algorithm.rejection_bounds=[0, 1e-9]")
    with pytest.raises(RolloutError, match=r'step 3 has a token.* algorithm.rejection = "seq_max_k2" excluded all'):
        trained_on(monkeypatch, *settings)
