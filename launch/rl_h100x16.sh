#!/usr/bin/env bash
# RL of Qwen2.5-32B on two nodes with 8 H100 each. Run the same command on each node:
#   NODE_RANK=0 HEAD_IP=10.0.0.1 bash launch/rl_h100x16.sh [section.key=value ...] [--dry-run]
# Slurm: srun --nodes 2 --ntasks-per-node 1 bash launch/rl_h100x16.sh
# After a kill, the same command resumes from the last complete checkpoint. RESTARTS=3 does so automatically.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python}" "${CONFIG:=configs/rl_qwen2.5_32b_h100x16.toml}"
source launch/env_cuda.sh
exec "$PYTHON" launch/nodes.py rl "$CONFIG" "$@"
