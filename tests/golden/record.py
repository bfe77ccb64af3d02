"""Write down what every shipped configuration changes in verl's settings, and the fingerprint of
verl's own.

python -m tests.golden.record      # records what test_golden_trees.py compares with; read the diff
"""

import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def fingerprint(defaults: dict[str, Any]) -> str:
    return hashlib.sha256(yaml.safe_dump(defaults, sort_keys=True).encode()).hexdigest()


def main(folder: Path) -> None:
    from retool_mcore.config import RlConfig, SftConfig, load_config
    from retool_mcore.platforms import get_platform
    from retool_mcore.train.dry_run import differences, resolve
    from retool_mcore.verl.keys.tree import sft_sections

    here = tempfile.mkdtemp()
    os.chdir(here)  # runs and data lie under the folder that a run is started in
    get_platform("cpu").activate()  # verl's classes import here; the trees are made for the runs' own platform
    fingerprints = {"verl": importlib.metadata.version("verl")}
    for path in sorted((ROOT / "configs").glob("*.toml")):
        kind = SftConfig if path.name.startswith("sft_") else RlConfig
        config = load_config(kind, path)
        platform = get_platform(config.run.platform)
        with patch.dict(os.environ):  # as on several nodes, without what this shell has exported
            for variable in platform.environment():
                os.environ.pop(variable.name, None)
            defaults, tree = resolve(config, platform)
        fingerprints[kind.__name__] = fingerprint(defaults)
        ours = {key: value for key, (_, value) in differences(defaults, tree).items()}
        if isinstance(config, SftConfig):  # verl's class of it reads the model's files, so resolve leaves it out
            ours |= {f"model.{key}": value for key, value in sft_sections(config, platform)["model"].items()}
        text = yaml.safe_dump(ours, sort_keys=True, width=10_000)  # no line break depends on the length of a folder
        text = text.replace(str(Path.cwd()), "<here>").replace(str(ROOT), "<checkout>")
        (folder / f"{path.stem}.yaml").write_text(text, encoding="utf-8")
    (folder / "verl_defaults.json").write_text(json.dumps(fingerprints, indent=1) + "\n", encoding="utf-8")
    os.chdir(ROOT)
    os.rmdir(here)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if sys.argv[1:] else HERE)
