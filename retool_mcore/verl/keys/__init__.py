"""Our settings as verl's keys: of its PPO trainer, of its rollout, of SFT's worker, and the keys
that we refuse.
"""
