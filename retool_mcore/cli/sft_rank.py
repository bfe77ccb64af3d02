"""One rank of SFT, started by `retool sft` in any directory; launch/sft_mcore.py does the same."""

from retool_mcore.cli.main import run_sft

if __name__ == "__main__":  # Megatron's checkpoint writers import this file again
    run_sft()
