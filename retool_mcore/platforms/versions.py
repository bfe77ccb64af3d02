"""The versions of other people's packages that this code was read against.

Patches and seams refuse others, and the extras of pyproject.toml allow no others:
tests/platforms/test_versions.py compares the two.
"""

VERSIONS = {
    "torch": ">=2.9,<2.14",
    "megatron-core": ">=0.16.1,<0.17",  # mbridge 0.15.1 cannot build a model of 0.17 and newer
    "transformer-engine": ">=2.11,<2.12",  # 2.13 wants cuBLAS 13.2, torch 2.11 brings 13.1; 2.12 has not been run
    "mbridge": "==0.15.1",
    "verl": "==0.9.1",
    "sglang": "==0.5.14",
    "ray": "==2.60.0",
}


def requirement(package: str) -> str:
    """The package with its range, in pip's form."""
    return package + VERSIONS[package]
