"""One rank of SFT, as `retool sft` starts it from any folder; launch/sft_mcore.py is the same."""

from retool_mcore.cli.main import run_sft

if __name__ == "__main__":  # Megatron's checkpoint writer starts processes that import this file again
    run_sft()
