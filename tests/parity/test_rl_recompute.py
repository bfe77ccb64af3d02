"""memory.recompute = "auto" in RL: the same updates, and only long micro-batches recompute.

Real verl workers with its losses of actor and critic, Megatron-core and gloo. The reference packs
everything into micro-batches that hold the longest response and keeps all activations, as a run
without "auto" must.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.megatron_ranks import launch_all, make_model
from tests.parity.rl_ranks import LENGTHS, PROMPT_TOKENS

USUAL = 64  # tokens of a micro-batch on one rank; the longest sequence has 90
LAYOUTS: dict[str, dict[str, int]] = {"dp2": {}, "tp2": {"tp": 2}, "cp2": {"cp": 2}}

# Two mini-batches of 271 and 272 tokens, whose longest rows have 50 and 90.
OF_ROWS = [f"data.max_prompt_tokens={PROMPT_TOKENS}", f"rollout.max_response_tokens={LENGTHS[1][-1]}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rl_recompute")
    model = str(make_model(folder / "model"))

    def job(name: str, role: str, layout: dict[str, int] | None = None, *, auto: bool) -> dict[str, Any]:
        tokens = USUAL if auto else 1000
        settings = {"model": model, "layout": layout or {}, "auto": auto, "micro_batch_tokens": tokens}
        return {"name": name, "role": role, "actions": [["update"]], "lr": 1e-3, **settings}

    one = [job(role, role, auto=False) for role in ("actor", "critic")]
    one += [job("actor_one", "actor", auto=True)]
    two = [job(f"actor_{name}", "actor", layout, auto=True) for name, layout in LAYOUTS.items()]
    two += [job(f"critic_{name}", "critic", LAYOUTS[name], auto=True) for name in ("dp2", "tp2")]
    tied, untied = tied_and_untied(folder)
    for tokens in (96, 200):
        run_file = [*OF_ROWS, f"train.micro_batch_tokens={tokens}"]
        one.append({**job(f"run_file_{tokens}", "actor", auto=False), "run_file": run_file})
    one += [{**job(f"critic_{path.name}", "critic", auto=False), "model": str(path)} for path in (tied, untied)]
    for jobs, layout in ((one, {}), (two, {"pp": 2})):
        critic = {**job("", "critic", layout, auto=False), "model": str(tied), "dtype": "bfloat16"}
        saved = str(folder / f"critic_of_{len(layout)}")
        for action, before in (("save", [["update"]]), ("load", [])):
            actions = [*before, [action, saved]]
            jobs.append({**critic, "name": f"critic_{action}_{len(layout)}", "actions": actions})
    return {name: answers[-1] for name, answers in launch_all({1: one, 2: two}, folder).items()}


def tied_and_untied(folder: Path) -> tuple[Path, Path]:
    """Two models that differ in their head alone: the first one's is its embedding."""
    import transformers

    tied = make_model(folder / "tied", tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tied)
    config = transformers.AutoConfig.from_pretrained(tied, tie_word_embeddings=False)
    other = transformers.AutoModelForCausalLM.from_config(config)
    other.load_state_dict({**model.state_dict(), "lm_head.weight": other.lm_head.weight.detach()})
    other.save_pretrained(folder / "untied")
    transformers.AutoTokenizer.from_pretrained(tied).save_pretrained(folder / "untied")
    return tied, folder / "untied"


@pytest.mark.parametrize("name", ["actor_one", *(f"actor_{layout}" for layout in LAYOUTS), "critic_dp2", "critic_tp2"])
def test_updates_are_those_of_a_run_that_recomputes_nothing(runs: dict[str, dict[str, Any]], name: str):
    want, got = runs[name.partition("_")[0]], runs[name]
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert all(norm > 1e-3 for norm in want["grad_norm"])
    assert max(abs(new - old) for new, old in zip(want["after"][0], want["before"][0], strict=True)) > 0.05
    # The rows of data-parallel rank 0, after both updates: every second row where there are two.
    rows = want["after"][:: 2 if name.endswith("dp2") else 1]
    for row, expected in zip(got["after"], rows, strict=True):
        assert row[:-1] == pytest.approx(expected[:-1], abs=2e-4)


def test_a_critic_begins_with_the_body_of_a_tied_model(runs: dict[str, dict[str, Any]]):
    """A tied model's checkpoint has no head to leave out."""
    want, got = runs["critic_untied"], runs["critic_tied"]
    for row, expected in zip(got["before"], want["before"], strict=True):
        assert row[:-1] == pytest.approx(expected[:-1], abs=2e-4)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("layout", [0, 1], ids=["one", "pp2"])
def test_a_checkpoint_has_the_value_head_of_a_tied_models_critic(runs: dict[str, Any], layout: int):
    """In bfloat16, where the optimizer's weights do not overwrite those of the model at a load."""
    assert runs[f"critic_load_{layout}"] == runs[f"critic_save_{layout}"]


def test_only_micro_batches_above_the_usual_size_recompute(runs: dict[str, dict[str, Any]]):
    """Of each data-parallel rank "seen" has [tokens, recomputed layers] of each pass."""
    for name in ("actor_one", "actor_dp2", "actor_tp2", "critic_dp2", "critic_tp2"):
        of_ranks = runs[name]["seen"]
        assert len({len(of_rank) for of_rank in of_ranks}) == 1, name
        passes = [each for of_rank in of_ranks for each in of_rank]
        assert {tokens > USUAL for tokens, _ in passes} == {True, False}, name
        assert all((layers > 0) == (tokens > USUAL) for tokens, layers in passes), name
    assert all(layers == 0 for _, layers in runs["actor"]["seen"][0])


def test_a_long_response_leaves_the_other_micro_batches_at_the_usual_size(runs: dict[str, dict[str, Any]]):
    """By the budget of the longest response alone, the second mini-batch would be cut into three:
    all recompute.
    """
    [passes] = runs["actor_one"]["seen"]
    totals = [sum(PROMPT_TOKENS + length for length in lengths) for lengths in LENGTHS]
    assert totals == [271, 272] and len(passes) == 5 + 5, passes
    assert max(tokens for tokens, _ in passes) == PROMPT_TOKENS + LENGTHS[1][-1] == 90


def test_an_actor_packs_micro_batches_up_to_the_run_files_tokens(runs: dict[str, dict[str, Any]]):
    for most, passes_of_both in ((96, range(6, 9)), (200, range(4, 5))):
        tokens = [tokens for tokens, _ in runs[f"run_file_{most}"]["seen"][0]]
        assert sum(tokens) == 271 + 272 and max(tokens) <= most and len(tokens) in passes_of_both, tokens
