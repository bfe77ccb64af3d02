"""The shapes of the model families that the recipes name, as their config.json have them."""

import json
from pathlib import Path
from typing import Any

# name: (config.json, parameters in millions as published)
FAMILIES: dict[str, tuple[dict[str, Any], float]] = {
    name: (family["config"], family["millions"])
    for name, family in json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8")).items()
}


def write_hub_cache(folder: Path, name: str) -> Path:
    """The model's config.json as the hub's client keeps it. Returns the snapshot's folder."""
    commit = "0" * 40
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(FAMILIES[name][0]))
    return snapshot
