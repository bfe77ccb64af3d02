#!/usr/bin/env bash
# RL of Qwen2.5-7B on one node of 8 H200. CONFIG=configs/rl_qwen2.5_32b_h200x8.toml for 32B.
#   bash launch/rl_h200x8.sh [section.key=value ...] [--dry-run]
# Killed? The same command continues from the last complete checkpoint; with RESTARTS=3 by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python}" "${CONFIG:=configs/rl_qwen2.5_7b_h200x8.toml}"
source launch/env_cuda.sh
exec "$PYTHON" launch/nodes.py rl "$CONFIG" "$@"
