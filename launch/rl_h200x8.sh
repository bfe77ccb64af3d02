#!/usr/bin/env bash
# RL of Qwen2.5-7B on one node with 8 H200. For 32B, set CONFIG=configs/rl_qwen2.5_32b_h200x8.toml.
#   bash launch/rl_h200x8.sh [section.key=value ...] [--dry-run]
# After a kill, the same command resumes from the last complete checkpoint. RESTARTS=3 does so automatically.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python}" "${CONFIG:=configs/rl_qwen2.5_7b_h200x8.toml}"
source launch/env_cuda.sh
exec "$PYTHON" launch/nodes.py rl "$CONFIG" "$@"
