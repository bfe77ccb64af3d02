"""The numbers of a step are verl's, whatever blocks its rows come in."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.verl.gap_sums import GapSums, KeptGaps, Mismatch
from tests.verl.loss_scenario import RL, tree
from tests.verl.unpadded_scenario import PROMPT, SIZE, Rows, Workers

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A setting: a critic wants a model's files."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, build_tokenizer(tokenizer_rows()), seed=0)
    return f"model.path={folder}"


def step(rows: Rows, *settings: str, verls: bool) -> dict[str, Any]:
    """The metrics of a step's stages on the driver; they leave columns in the queue."""
    from verl.trainer.ppo.core_algos import get_kl_controller
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl.trainer import ReToolTrainer
    from retool_mcore.verl.unpadded import FORWARD, UnpaddedTrainer

    trainer = object.__new__(ReToolTrainer)  # verl's set-up starts workers
    trainer._run = load_config(RlConfig, RL, [f"rollout.group_size={SIZE}", *settings])
    trainer.config = tree(f"rollout.group_size={SIZE}", *settings)
    trainer.use_critic, trainer.global_steps = trainer._run.algorithm.name == "ppo", 5
    trainer.kl_ctrl_in_reward = get_kl_controller(trainer.config.algorithm.kl_ctrl)
    trainer._rollout_moe_lb_metrics_accumulator = None
    trainer._get_n_gpus_for_throughput = lambda: 1
    trainer.actor_rollout_wg = workers = Workers(rows)
    trainer._forget_step()
    stages = PPOTrainer if verls else UnpaddedTrainer
    metrics: dict[str, Any] = {}
    batch = stages._compute_old_log_prob(trainer, rows.batch(), metrics)
    assert verls or (batch.fields, batch.extra_info) == (list(FORWARD), {}), "the update is no pass without a loss"
    asked = {"calculate_entropy": True, "compute_loss": False, "temperature": trainer._run.rollout.temperature}
    assert verls or workers.asked == [([*FORWARD, "rollout_log_probs"], asked | {"retool_step": 1})]
    batch = stages._compute_advantage(trainer, batch, metrics)
    batch.tags = rows.tags
    stages._compute_metrics(trainer, batch, metrics, {"step": 2.0, "adv": 1.0, "gen": 0.5}, 5, 0)
    return metrics | {"mismatch": trainer._mismatch.metrics()}


@pytest.mark.parametrize("tokens", [1, 97, 1 << 20], ids=["a row a block", "some rows", "all at once"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo algorithm.normalize_by_std=false rollout.temperature=0.7"])
def test_every_number_is_verls(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import blocks

    monkeypatch.setattr(blocks, "BLOCK_TOKENS", tokens)
    theirs, ours = Rows(monkeypatch), Rows(monkeypatch)
    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_base.tq", theirs)
    settings = f"algorithm.name={name}".split()
    known, found = step(theirs, *settings, verls=True), step(ours, *settings, verls=False)
    for key, row in theirs.rows.items():
        for column in ("old_log_probs", "advantages"):
            torch.testing.assert_close(read(ours.rows[key], column), row[column], atol=1e-6, rtol=1e-6)
    missing = known.keys() - found.keys()
    assert not missing
    of_rows = ("training_ppl", "rollout_ppl", "log_ppl", "ppl_ratio", "chi2_seq")
    for name_, value in known.items():
        if name_ in ("actor/entropy", "mismatch") or any(each in name_ for each in of_rows):
            continue  # below: verl counts rows of padding, too, or weighs by the loss
        assert found[name_] == pytest.approx(value, rel=2e-5, abs=2e-6), name_
    assert len(known) > 60


RPP, BASELINE = "algorithm.name=reinforce_plus_plus", "algorithm.name=reinforce_plus_plus_baseline"
PPO, WEIGHS, BOUNDS = "algorithm.name=ppo", "algorithm.importance_sampling=", "algorithm.importance_bounds="
KL = ("algorithm.kl_in=reward", "algorithm.kl_coef=0.3", "algorithm.kl_type=k3")
RATIO = ("algorithm.rejection_bounds=[0.93, 1.07]",)
SIGNALS = [
    ("algorithm.normalize_by_std=false",),
    ("algorithm.name=opo",),
    (RPP,),
    (RPP, "algorithm.gamma=0.9"),
    (RPP, "algorithm.gamma=0.9", *KL),
    (BASELINE,),
    (PPO,),
    (PPO, "algorithm.gamma=0.97", "algorithm.lam=0.8"),
    (PPO, "algorithm.lam=0.9", *KL),
    (WEIGHS + "token", BOUNDS + "[0, 1.2]"),
    (WEIGHS + "sequence", BOUNDS + "[0, 1.5]"),
    (WEIGHS + "token", BOUNDS + "[0.8, 1.3]"),
    (WEIGHS + "sequence", BOUNDS + "[0.5, 1.5]", RPP),
    ("algorithm.rejection=token_k1", *RATIO),
    ("algorithm.rejection=token_k3", "algorithm.rejection_bounds=[0, 0.05]", WEIGHS + "sequence", BASELINE),
    ("algorithm.rejection=seq_sum_k1", *RATIO, RPP),
    ("algorithm.rejection=seq_mean_k1", *RATIO, "algorithm.name=opo"),
    ("algorithm.rejection=seq_sum_k2", "algorithm.rejection_bounds=[0, 1.0]", PPO),
    ("algorithm.rejection=seq_mean_k2", "algorithm.rejection_bounds=[0, 0.045]"),
    ("algorithm.rejection=seq_max_k3", "algorithm.rejection_bounds=[0, 0.3]", BASELINE),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SIGNALS, ids=lambda settings: " ".join(settings).replace("algorithm.", ""))
def test_every_signal_and_its_metrics_are_verls(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, model: str):
    from retool_mcore.verl import blocks

    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 97)
    monkeypatch.setattr("retool_mcore.verl.gap_sums._PIECE", 61)
    columns, told = list[dict[str, torch.Tensor]](), list[dict[str, Any]]()
    for verls in (True, False):
        rows = Rows(monkeypatch, padding=False)
        told.append(step(rows, *settings, model, verls=verls))
        columns.append({name: flat(rows, name) for name in rows.rows["g0_0_0"] if name not in TOLD})
    learnt_N = columns[0]["response_mask"].bool()
    assert torch.equal(columns[1]["response_mask"].bool(), learnt_N) and 0 < int(learnt_N.sum()) < len(learnt_N)
    for name in {"advantages", "returns", "rollout_is_weights", "token_level_rewards"} & columns[0].keys():
        found_N = columns[1].get(name, columns[1]["advantages"])
        torch.testing.assert_close(found_N[learnt_N], columns[0][name][learnt_N], atol=2e-6, rtol=2e-6)
    for name, value in told[0].items():
        if name not in ("mismatch", "actor/entropy"):
            assert told[1][name] == pytest.approx(value, rel=5e-5, abs=5e-6), name


@pytest.mark.parametrize("settings", [(), ("algorithm.rejection=token_k1", *RATIO)])
def test_tokens_are_read_once_for_rewards_and_advantages(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import blocks

    found = list[torch.Tensor]()
    for tokens in (97, 1 << 20):
        monkeypatch.setattr(blocks, "BLOCK_TOKENS", tokens)
        rows, asked = Rows(monkeypatch), list[list[str]]()
        get = rows.kv_batch_get
        rows.kv_batch_get = lambda select_fields, asked=asked, get=get, **given: (
            asked.append(select_fields) or get(select_fields=select_fields, **given)
        )
        step(rows, *settings, verls=False)
        found.append(flat(rows, "advantages"))
        assert all(row["advantages"].ndim == 0 for row in rows.rows.values()), "one number of a response is stored"
    assert len([names for names in asked if names[0] == "response_mask" and "entropy" not in names]) == 1
    assert torch.equal(*found) and found[0].abs().sum() > 1


TOLD = ("uid", "num_turns", "extra_fields")


def read(row: dict[str, Any], name: str) -> Any:
    """A row's column [T] as an update reads it."""
    from tensordict import TensorDict

    from retool_mcore.verl.update_columns import complete

    if row[name].ndim:
        return row[name]
    mask = torch.nested.as_nested_tensor([row["response_mask"]], layout=torch.jagged)
    data = TensorDict({"response_mask": mask, name: row[name][None]}, batch_size=1)
    complete(data)
    return data[name].values()


def flat(rows: Rows, name: str) -> torch.Tensor:
    return torch.cat([read(row, name) for row in rows.rows.values()])


def test_a_response_without_a_token_in_the_loss_is_no_response_on_which_both_agree(monkeypatch: pytest.MonkeyPatch):
    """Masked responses and the rows that pad a batch; verl takes their weight as 1."""
    settings = (
        WEIGHS + "token",
        BOUNDS + "[0, 1.2]",
        "algorithm.rejection=seq_max_k2",
        "algorithm.rejection_bounds=[0, 0.2]",
    )
    told = [step(Rows(monkeypatch, padding=padding), *settings, verls=False) for padding in (False, True)]
    named = [{name: value for name, value in each.items() if name.startswith("rollout_corr/")} for each in told]
    assert named[0] == named[1] and len(named[0]) > 40
    known = step(Rows(monkeypatch, padding=True), *settings, verls=True)
    assert known["rollout_corr/rollout_is_seq_min"] < named[0]["rollout_corr/rollout_is_seq_min"]


def test_what_engine_and_actor_say_is_verls_over_rows_with_tokens_in_the_loss(monkeypatch: pytest.MonkeyPatch):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    rows = Rows(monkeypatch)
    found = step(rows, verls=False)
    real = [row for row in rows.rows.values() if row["response_mask"].any()]
    actor, engine, mask = (
        torch.nn.utils.rnn.pad_sequence([row[name] for row in real], batch_first=True)
        for name in ("old_log_probs", "rollout_log_probs", "response_mask")
    )
    _, _, known = compute_rollout_correction_and_rejection_mask(actor, engine, mask)
    assert len(known) == 13 and known["rollout_corr/kl"] != pytest.approx(0, abs=1e-3)
    for name, value in known.items():
        assert found[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
    learnt = mask.bool()
    entropy = torch.cat([row["entropy"][PROMPT - 1 : -1][row["response_mask"].bool()] for row in real])
    assert found["actor/entropy"] == pytest.approx(float(entropy.mean()), rel=1e-6)
    sizes = sorted((actor - engine)[learnt].abs().tolist())
    assert found["mismatch"]["mismatch/max"] == sizes[-1]
    assert found["mismatch"]["mismatch/p99"] == sizes[math.ceil(0.99 * len(sizes)) - 1]
    assert found["mismatch"]["mismatch/kl"] == pytest.approx(known["rollout_corr/kl"], rel=1e-5)


def test_mismatch_is_over_rejected_tokens_too(monkeypatch: pytest.MonkeyPatch):
    """And over none of the interpreter's: the engine's numbers there are of nothing sampled."""
    rows = Rows(monkeypatch)
    before = step(rows, verls=False)["mismatch"]
    rows = Rows(monkeypatch)
    learnt = {key: int(row["response_mask"].sum()) for key, row in rows.rows.items()}
    rejected = step(rows, "algorithm.rejection=token_k2", "algorithm.rejection_bounds=[0, 0.01]", verls=False)
    assert rejected["mismatch"] == before
    left = {key: int(row["response_mask"].sum()) for key, row in rows.rows.items()}
    assert 0 < sum(left.values()) < 0.8 * sum(learnt.values())


def test_blocks_have_up_to_so_many_tokens_and_a_row_at_least(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import blocks

    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 100)
    assert list(blocks._cut(list(zip("abcdef", [60, 40, 1, 200, 50, 50], strict=True)))) == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e", "f"],
    ]


@pytest.mark.parametrize("piece", [700, 100_000])
def test_the_largest_gaps_are_exact_however_they_come(piece: int):
    drawn = torch.Generator().manual_seed(3)
    gap_N = torch.randn(100_000, generator=drawn) * torch.rand(100_000, generator=drawn)
    mismatch = Mismatch(100_000)
    for part in gap_N.split(piece):
        mismatch.add(part, len(part))
    sizes = sorted(gap_N.abs().tolist())
    found = mismatch.metrics()
    assert (found["mismatch/max"], found["mismatch/p99"]) == (sizes[-1], sizes[98_999])
    assert mismatch._kept < 5_000 + piece
    assert Mismatch(10).metrics() == {}


@pytest.mark.parametrize("zeros", [0, 99_500, 100_000])
def test_the_largest_gaps_are_exact_where_workers_keep_them(zeros: int):
    """Of a step's two batches."""
    drawn = torch.Generator().manual_seed(3)
    gap_N = torch.randn(100_000, generator=drawn) * torch.rand(100_000, generator=drawn)
    gap_N[:zeros] = 0.0
    kept = [KeptGaps(1) for _ in range(3)]
    for rank, part in zip([0, 1, 0], gap_N.split(40_000), strict=True):
        kept[rank].add(part, len(part))

    class Workers:
        def gap_histogram(self) -> list[Any]:
            return [None, *(each.histogram() for each in kept)]

        def gaps_of_bin(self, number: int) -> list[Any]:
            return [None, *(each.of_bin(number) for each in kept)]

    mismatch = Mismatch(100_000)
    mismatch.kept_by(Workers(), 40_000, float(gap_N[:40_000].sum()))
    mismatch.kept_by(Workers(), 60_000, float(gap_N[40_000:].sum()))
    sizes, found = sorted(gap_N.abs().tolist()), mismatch.metrics()
    assert (found["mismatch/max"], found["mismatch/p99"]) == (sizes[-1], sizes[98_999])
    assert found["mismatch/kl"] == pytest.approx(-float(gap_N.double().mean()), abs=1e-7)


def test_a_worker_forgets_gaps_of_another_step_and_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch):
    rows = Rows(monkeypatch)
    workers, batch = Workers(rows), rows.batch()
    batch.fields = ["response_mask", "rollout_log_probs"]
    counts = []
    for number in (1, 1, 2):
        batch.extra_info = {"retool_step": number}
        workers.old_log_probs(batch)
        counts.append(sum(int(told[0].sum()) for told in workers.gap_histogram() if told))
    learnt = sum(int(row["response_mask"].sum()) for row in rows.rows.values())
    assert counts == [learnt, 2 * learnt, learnt]
    workers.gaps_of_bin(0)
    assert workers.gap_histogram() == [None, None, None]


def test_the_passs_other_columns_go_on_to_the_queue(monkeypatch: pytest.MonkeyPatch):
    """With router_replay = "R2" the experts of its tokens, which the update repeats."""
    rows = Rows(monkeypatch)
    for row in rows.rows.values():
        row["routed_experts"] = row.pop("responses") + 1
    before, stored = rows.batch(), dict[str, set[str]]()
    before.fields, before.extra_info = ["response_mask", "rollout_log_probs", "routed_experts"], {"retool_step": 1}
    put = rows.kv_batch_put
    rows.kv_batch_put = lambda keys, partition, fields: (
        stored.update({key: set(fields.keys()) for key in keys}) or put(keys, partition, fields)
    )
    Workers(rows, "routed_experts").old_log_probs(before)
    assert stored == {key: {"old_log_probs", "gap_numbers", "routed_experts"} for key in rows.rows}
    assert all(row["routed_experts"].eq(2).all() for row in rows.rows.values())


def test_a_step_of_no_token_in_the_loss_has_no_numbers():
    sums = GapSums(Mismatch(10))
    values = torch.tensor([-1.0, -2.0])
    sums.add(values, values, torch.zeros(2, dtype=torch.long), np.array([0]), values)
    assert sums.metrics() == {}


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_a_response_alone_in_its_group_is_compared_with_nothing(name: str):
    """As verl has it: a mean of one would leave 0 of every reward."""
    from retool_mcore.verl.learning_signal import LearningSignal

    signal = LearningSignal(load_config(RlConfig, RL, [f"algorithm.name={name}"]).algorithm)
    keys, rewards, learnt = ["a_0_0", "b_0_0", "b_1_0"], np.array([0.5, 1.0, -1.0]), np.array([3, 3, 3])
    found = signal._compared(keys, rewards, learnt)
    assert found[0] == pytest.approx(0.5, rel=1e-5) and found[1] == pytest.approx(-found[2])


PLAIN = "algorithm.old_log_prob=rollout"


@pytest.mark.parametrize(
    ("words", "ahead_pays"),
    [
        ([PLAIN], True),
        (["algorithm.importance_sampling=token"], False),
        (["algorithm.kl_in=reward", "algorithm.kl_type=k2", "algorithm.kl_coef=0.1"], False),
    ],
    ids=["as sampled", "with weights, of log-probabilities that are not there yet", "less a divergence of these"],
)
def test_rows_that_were_read_while_others_were_sampled_are_not_read_again(
    words: list[str], ahead_pays: bool, monkeypatch: pytest.MonkeyPatch
):
    from retool_mcore.verl.learning_signal import LearningSignal

    found, reads = list[Any](), list[list[str]]()
    penalty = SimpleNamespace(value=0.1, update=lambda **_: None) if "algorithm.kl_in=reward" in words else None
    for ahead in (False, True):
        rows = Rows(monkeypatch)
        for row in rows.rows.values():
            row["old_log_probs"] = row["rollout_log_probs"] + 0.1
            row["ref_log_prob"] = row["rollout_log_probs"] - 0.2
        get = rows.kv_batch_get
        rows.kv_batch_get = lambda keys, get=get, **rest: reads.append(keys) or get(keys, **rest)
        signal, batch = LearningSignal(load_config(RlConfig, RL, words).algorithm), rows.batch()
        if ahead:
            reads.clear()
            signal.read_ahead(["g1_0_0", "g1_1_0"], "train")
            signal._ahead.known()
        metrics = signal.prepare(batch, penalty)
        signal.advantages(batch)
        values = {key: row["advantages"].tolist() for key, row in rows.rows.items()}
        found.append((signal.rows, metrics, values, signal.metrics()))
    assert found[0] == found[1] and len(found[0][0]) == len(found[0][2]) == 25
    first = ["g1_0_0", "g1_1_0"]
    assert reads == ([first, [key for key in batch.keys if key not in first]] if ahead_pays else [batch.keys])
