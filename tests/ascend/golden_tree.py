"""Write the whole verl tree of every Ascend configuration as YAML, with this machine's folders replaced.

python tests/ascend/golden_tree.py tests/ascend/golden      # records what the tests compare with
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


def main(folder: Path, others: Path | None) -> None:
    """Trees into ``folder``; into ``others`` the keys that verl's own tree does not have."""
    from omegaconf import OmegaConf

    from retool_mcore.config import RlConfig, SftConfig, load_config
    from retool_mcore.platforms import get_platform
    from retool_mcore.train.resolve import MISSING, differences, resolve

    here = tempfile.mkdtemp()
    os.chdir(here)  # runs and data lie under the folder that a run is started in
    get_platform("cpu").activate()  # verl's classes import here; the trees are made for the runs' own platform
    for path in sorted((ROOT / "configs").glob("*_a2x*.toml")):
        config = load_config(SftConfig if path.name.startswith("sft_") else RlConfig, path)
        defaults, tree = resolve(config, get_platform(config.run.platform))
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
        text = yaml.safe_dump(plain, sort_keys=True, width=10_000)  # no line break depends on the length of a folder
        text = text.replace(str(Path.cwd()), "<here>").replace(str(ROOT), "<checkout>")
        (folder / f"{path.stem}.yaml").write_text(text, encoding="utf-8")
        if others is not None:
            added = [key for key, (default, _) in differences(defaults, tree).items() if default == MISSING]
            (others / f"{path.stem}.added.json").write_text(json.dumps(added), encoding="utf-8")
    os.rmdir(here)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute() if len(sys.argv) > 2 else None)
