#!/usr/bin/env bash
# Serves the code sandbox of one node, on any hardware. It prints the URL once the server answers, restarts
# the server if it dies, and stops it on exit.
#   bash launch/sandbox.sh [--socket PATH | --host H --port P] [--workers N] [--min-level LEVEL] [--sessions N]
#                          [--processes N] [--python PATH] [--preload MODULE ...]
# To run a command with it:  bash launch/sandbox.sh --port 8080 -- bash launch/rl_h200x8.sh
set -euo pipefail
: "${PYTHON:=python}"
options=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do options+=("$1"); shift; done
[ "${1:-}" = "--" ] && shift

state=$(mktemp -d)
mkfifo -m 600 "$state/first_line"

# Runs the server, and restarts it at the same address whenever it exits.
keep() {
  local server="" code pause=1 began
  trap '[ -z "$server" ] || { kill "$server"; wait "$server"; } 2>/dev/null; exit 0' TERM
  "$PYTHON" -m retool_mcore.sandbox serve "${options[@]}" >"$state/first_line" &
  server=$!
  wait "$server" && code=0 || code=$?
  [ -s "$state/url" ] || exit "$code"  # it did not start; stderr has the reason
  case $(<"$state/url") in http://*) options+=(--port "$(sed 's/.*://' "$state/url")") ;; esac
  while :; do
    echo "the sandbox exited with code $code and will restart in $pause s" >&2
    server=""
    sleep "$pause"
    began=$SECONDS
    "$PYTHON" -m retool_mcore.sandbox serve "${options[@]}" >/dev/null &
    server=$!
    wait "$server" && code=0 || code=$?
    pause=$((SECONDS - began > 60 ? 1 : pause < 30 ? 2 * pause : 30))
  done
}
keep &
keeper=$!
trap 'kill "$keeper" 2>/dev/null || true; wait "$keeper" 2>/dev/null || true; rm -rf "$state"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

read -r url <"$state/first_line" || { wait "$keeper"; exit 1; }
echo "$url" >"$state/url"
"$PYTHON" -m retool_mcore.sandbox ping "$url"
echo "$url"
if [ $# -gt 0 ]; then SANDBOX_URL="$url" "$@"; else wait "$keeper"; fi
