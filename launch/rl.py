"""RL with verl's PPO trainer under Ray: python launch/rl.py CONFIG.toml [section.key=value ...]"""

from retool_mcore.cli.main import run_rl

if __name__ == "__main__":  # Ray workers import this file again
    run_rl()
