"""One rank of SFT on Megatron, started by torchrun. launch/nodes.py starts several nodes.

torchrun --nproc-per-node N launch/sft_mcore.py CONFIG.toml [section.key=value ...]
"""

from retool_mcore.cli.main import run_sft

if __name__ == "__main__":  # Megatron's checkpoint writer processes import this file again
    run_sft()
