"""Our settings as verl's keys: for PPO trainer, rollout and SFT worker; and the refused keys."""
