"""Samples by a request's seed follow its distribution."""

import torch

from retool_mcore.platforms.cpu.seeded_sampling import multinomial_with_seed, uniform

PROBS = [0.5, 0.3, 0.0, 0.2]


def draws(seeds: list[int], positions: list[int]) -> list[int]:
    logprobs_NV = torch.tensor(PROBS).log().expand(len(seeds), -1)
    indices_N1 = multinomial_with_seed(logprobs_NV, torch.tensor(seeds), torch.tensor(positions))
    assert indices_N1.shape == (len(seeds), 1)
    return indices_N1[:, 0].tolist()


def test_tokens_are_drawn_from_their_distribution_over_seeds_and_over_positions():
    n = 20_000
    for seeds, positions in ((list(range(n)), [7] * n), ([7] * n, list(range(n)))):
        counts = torch.bincount(torch.tensor(draws(seeds, positions)), minlength=4) / n
        # Four standard deviations of a share of 20,000 draws are at most 0.014.
        torch.testing.assert_close(counts, torch.tensor(PROBS), atol=0.0142, rtol=0)
        assert counts[2] == 0, "what has no probability is never drawn"


def test_unnormalised_weights_and_the_ends_of_the_range():
    weights_NV = torch.tensor([[0.0, 2.0, 2.0, 0.0]]).log()
    taken = {int(multinomial_with_seed(weights_NV, torch.tensor([s]), torch.tensor([0]))) for s in range(200)}
    assert taken == {1, 2}, "neither the first nor the last, which weigh nothing"
    assert all(0.0 <= uniform(seed, 0) < 1.0 for seed in range(1000))
