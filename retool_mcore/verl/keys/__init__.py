"""Maps our settings to verl's keys, and lists the keys that [verl_overrides] may not set."""
