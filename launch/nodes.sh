# Sourced by the launch scripts: which node this is, and what a run needs beside itself, started and
# stopped again.
: "${PYTHON:=python}" "${DRY_RUN:=}" "${RESTARTS:=0}" "${RESTART_WAIT_S:=10}" "${RAY_PORT:=6379}" "${TORCH_PORT:=29500}" "${HEAD_WAIT_S:=25}" "${NODES_WAIT_S:=120}" "${GRACE_S:=25}"
exec 3>&1  # for what a dry run shows
started=()  # leaders of the process groups that this script has started

fail() { echo "error: $*" >&2; exit 2; }

# prepare PROGRAM CONFIG [section.key=value ...] [--dry-run]: sets KEYS, the settings of the command
# line, and which node this is; then checks that it has all that the run needs, before anything is
# started. In a dry run the program reports, and every command is shown in place of carried out.
prepare() {
  local program=$1 config=$2 word
  KEYS=()
  for word in "${@:3}"; do
    if [ "$word" = --dry-run ]; then DRY_RUN=1; else KEYS+=("$word"); fi
  done
  if [ -n "$DRY_RUN" ]; then
    "$PYTHON" "$program" "$config" "${KEYS[@]}" --dry-run
    printf '\n# The commands of node %s:\n' "${NODE_RANK:-0}"
  fi
  find_node "$config" "${KEYS[@]}"
  step "$PYTHON" -m retool_mcore preflight "$config" "${KEYS[@]}"
}

# step COMMAND...: carries it out, or shows it in a dry run.
step() {
  [ -n "$DRY_RUN" ] || { "$@"; return; }
  printf '%q ' "$@" >&3
  echo >&3
}

# find_node CONFIG [section.key=value ...]: sets NODES, DEVICES, PLATFORM, RUN, ROOT, NODE_RANK and
# HEAD_IP.
find_node() {
  read -r NODES DEVICES PLATFORM RUN ROOT GRACE_S < <("$PYTHON" -m retool_mcore get "$@" cluster.nodes \
    cluster.gpus_per_node run.platform run.name run.root checkpoint.grace_s) || exit 2
  if [ -z "${NODE_RANK:-}" ] && [ -n "${SLURM_NODEID:-}" ]; then
    NODE_RANK=$SLURM_NODEID
    HEAD_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
    HEAD_IP=$({ getent ahostsv4 "$HEAD_IP" || echo "$HEAD_IP"; } | awk 'NR == 1 {print $1}')  # Ray wants a number
  fi
  if [ "$NODES" = 1 ]; then NODE_RANK=0 HEAD_IP=${HEAD_IP:-127.0.0.1}; fi
  if [ -n "$DRY_RUN" ]; then NODE_RANK=${NODE_RANK:-0} HEAD_IP=${HEAD_IP:-HEAD_IP}; fi
  [ -n "${NODE_RANK:-}" ] && [ -n "${HEAD_IP:-}" ] ||
    fail "cluster.nodes = $NODES, and NODE_RANK and HEAD_IP are not both set. Set them on each node, or use Slurm."
  [ "$NODE_RANK" -lt "$NODES" ] 2>/dev/null ||
    fail "NODE_RANK = $NODE_RANK is not one of 0 to $((NODES - 1)), and cluster.nodes = $NODES."
}

# start COMMAND...: in the background, in a process group of its own; it ends when this script does,
# however that ends.
start() {
  [ -z "$DRY_RUN" ] || { printf '%q ' "$@" >&3; echo "&" >&3; return; }
  setsid setpriv --pdeathsig TERM -- "$@" &
  started+=("$!")
}

# run COMMAND...: starts it and waits. A run that ended by a fault, not by its user or a mistake of
# theirs, starts again up to RESTARTS times, each after twice the wait; it goes on from its checkpoint.
run() {
  local code tries=0 wait_s=$RESTART_WAIT_S
  while true; do
    start "$@"
    [ -z "$DRY_RUN" ] || return 0
    code=0
    wait "${started[-1]}" || code=$?
    case $code in 0 | 2 | 130 | 143) return "$code" ;; esac
    kill -KILL -- "-${started[-1]}" 2>/dev/null || true  # what a killed launcher has left
    unset 'started[-1]'
    [ $tries -lt "$RESTARTS" ] || return "$code"
    tries=$((tries + 1))
    echo "the run ended by a fault (exit code $code); start $tries of RESTARTS = $RESTARTS follows in $wait_s s" >&2
    sleep "$wait_s" & wait $!  # a signal to this script ends the wait
    wait_s=$((wait_s * 2))
  done
}

stop_started() {
  trap - EXIT
  local i
  trap 'kill -TERM "${started[i]}" 2>/dev/null || true' INT TERM  # the second one: a run then ends at once
  for ((i = ${#started[@]} - 1; i >= 0; i--)); do  # the last one first: the run, then Ray, then the sandbox
    # To the leader alone: a run saves within checkpoint.grace_s, with what it has started.
    kill -TERM "${started[i]}" 2>/dev/null && gone_within $((${GRACE_S%.*} + 20)) "${started[i]}"
    kill -TERM -- "-${started[i]}" 2>/dev/null || continue
    gone_within 20 "-${started[i]}" || kill -KILL -- "-${started[i]}" 2>/dev/null || true
  done
}

# gone_within SECONDS PID: waits for a process, or for the process group -PID.
gone_within() {
  local end=$((SECONDS + $1))
  while kill -0 -- "$2" 2>/dev/null; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.1
  done
}
trap stop_started EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start_sandbox CONFIG [section.key=value ...]: one service for all of this node; the same path on
# every node, so that one setting names it. It is started again when it dies or stands still.
# SANDBOX_OPTIONS="--metrics-port 9090 --host 10.0.0.1" shows its health and metrics to a monitor.
# Sets SANDBOX_URL, and IN_SANDBOX: settings that are the service's from here on, not the run's.
start_sandbox() {
  local folder=${SANDBOX_DIR:-/tmp/retool-sandbox-$(id -u)}/$RUN level workers python modules
  read -r level workers modules < <("$PYTHON" -m retool_mcore get "$@" sandbox.min_level sandbox.workers \
    sandbox.preload) || exit 2
  python=$("$PYTHON" -m retool_mcore get "$@" sandbox.python) || exit 2  # by itself: it may be empty
  IN_SANDBOX=(sandbox.python= "sandbox.preload=[]")
  SANDBOX_URL=unix://$folder/sandbox.sock
  local serve=(bash launch/sandbox.sh --socket "$folder/sandbox.sock" --min-level "$level" --workers "$workers"
    --processes $(((workers + 15) / 16)) ${python:+--python "$python"} ${modules:+--preload ${modules// / --preload }}
    ${SANDBOX_OPTIONS:-})
  [ -z "$DRY_RUN" ] || { start "${serve[@]}"; return; }
  mkdir -p -m 700 "$folder"
  rm -f "$folder/sandbox.sock"
  start "${serve[@]}" >"$folder/log" 2>&1
  for _ in $(seq 300); do [ -S "$folder/sandbox.sock" ] && return 0; kill -0 "${started[-1]}" 2>/dev/null || break; sleep 0.1; done
  fail "the sandbox of this node does not answer: $(tail -n 3 "$folder/log")"
}

# This node's part of the run's Ray cluster. Processes of the run get their environment from verl,
# not from here.
start_ray() {
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # when Ray is stopped the run has ended: there is nothing to move away
  local resources
  resources=(--num-gpus "$DEVICES")
  [ "$PLATFORM" = ascend ] && resources=(--resources "{\"NPU\": $DEVICES}")
  [ "$PLATFORM" = cpu ] && resources+=(--num-cpus 16)  # logical: actors that mostly wait
  share_ray_token
  local common=(--disable-usage-stats --block "${resources[@]}" ${RAY_START_OPTIONS:-})
  if [ "$NODE_RANK" = 0 ]; then
    start "$PYTHON" -m ray.scripts.scripts start --head --include-dashboard false --node-ip-address "$HEAD_IP" \
      --port "$RAY_PORT" "${common[@]}" >/dev/null
  else
    wait_for_head "$RAY_PORT"
    start "$PYTHON" -m ray.scripts.scripts start --address "$HEAD_IP:$RAY_PORT" ${NODE_IP:+--node-ip-address "$NODE_IP"} \
      "${common[@]}" >/dev/null
  fi
  [ -n "$DRY_RUN" ] || RAY_LEADER=${started[-1]}
  export RAY_ADDRESS=$HEAD_IP:$RAY_PORT RETOOL_RAY_ADDRESS=$HEAD_IP:$RAY_PORT  # the second: it is this run's
}

# Ray's nodes prove to each other that they belong together by a secret, kept in the run's folder,
# which all nodes share.
share_ray_token() {
  [ -z "$DRY_RUN" ] || return 0
  export RAY_AUTH_MODE=token
  [ -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || return 0
  export RAY_AUTH_TOKEN_PATH=$PWD/$ROOT/$RUN/ray_token
  [ "${ROOT:0:1}" != / ] || RAY_AUTH_TOKEN_PATH=$ROOT/$RUN/ray_token
  local end=$((SECONDS + HEAD_WAIT_S))
  if [ "$NODE_RANK" = 0 ] && [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH.new")
    mv "$RAY_AUTH_TOKEN_PATH.new" "$RAY_AUTH_TOKEN_PATH"
  fi
  until [ -s "$RAY_AUTH_TOKEN_PATH" ]; do
    [ $SECONDS -lt $end ] || fail "$RAY_AUTH_TOKEN_PATH of node 0 is not seen here: run.root must be a folder that all" \
      "nodes share. Or node 0 has not been started."
    sleep 0.5
  done
}

serve_unless_head() {
  [ "$NODE_RANK" = 0 ] && return 0
  [ -z "$DRY_RUN" ] || exit 0
  echo "node $NODE_RANK has joined $RAY_ADDRESS and serves until node 0 leaves" >&2
  wait "$RAY_LEADER" || true
  exit 0
}

wait_for_head() {
  [ -z "$DRY_RUN" ] || return 0
  local end=$((SECONDS + HEAD_WAIT_S))
  until (exec 3<>"/dev/tcp/$HEAD_IP/$1") 2>/dev/null; do
    [ $SECONDS -lt $end ] || fail "HEAD_IP = $HEAD_IP does not answer on port $1 within $HEAD_WAIT_S s. Start node 0 first," \
      "check the address and the firewall, or set HEAD_WAIT_S."
    sleep 0.5
  done
}
