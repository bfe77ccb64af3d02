"""SFT on Megatron, on one node.

torchrun --nproc-per-node N launch/sft_mcore.py CONFIG.toml [section.key=value ...]
"""

from retool_mcore.cli.main import run_sft

if __name__ == "__main__":  # Megatron's checkpoint writer processes import this file again
    run_sft()
