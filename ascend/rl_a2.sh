#!/usr/bin/env bash
# RL of Qwen2.5-7B on one Atlas 800T A2 node:
#   bash ascend/rl_a2.sh [section.key=value ...] [--dry-run]
# RL of 32B on four nodes: run the same on each node with CONFIG=configs/rl_qwen2.5_32b_a2x32.toml,
# NODE_RANK and HEAD_IP.
# After a kill, the same command resumes from the last complete checkpoint. RESTARTS=3 does so automatically.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python}" "${CONFIG:=configs/rl_qwen2.5_7b_a2x8.toml}"
source launch/env_a2.sh
exec "$PYTHON" launch/nodes.py rl "$CONFIG" "$@"
