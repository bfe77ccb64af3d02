# Sourced by the launch scripts: which node this is, and what a run needs beside itself, started and
# stopped again.
: "${PYTHON:=python}" "${DRY_RUN:=}" "${RESTARTS:=0}" "${RESTART_WAIT_S:=10}" "${RAY_PORT:=6379}" "${TORCH_PORT:=29500}" "${HEAD_WAIT_S:=25}" "${NODES_WAIT_S:=120}" "${LOCK_WAIT_S:=30}" "${GRACE_S:=25}"
exec 3>&1  # for what a dry run shows
started=()   # leaders of the process groups that this script has started
services=()  # the same of what serves beside the run, and of what only looks
AGAIN=()     # a command that comes before a run starts again
RAY_FOLDER=""

fail() { echo "error: $*" >&2; exit 2; }

# prepare PROGRAM CONFIG [section.key=value ...] [--dry-run]: sets KEYS, the settings of the command
# line, and which node this is; holds the run's folder; then checks that this node has all that the
# run needs, before anything is started. In a dry run the program reports, and every command is shown
# in place of carried out.
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
  hold_run
  step "$PYTHON" -m retool_mcore preflight "$config" "${KEYS[@]}"
}

# step COMMAND...: carries it out, or shows it in a dry run. A signal to this script ends it.
step() {
  [ -z "$DRY_RUN" ] || { printf '%q ' "$@" >&3; echo >&3; return; }
  local code=0
  serve "$@"
  wait "${services[-1]}" || code=$?
  unset 'services[-1]'
  return "$code"
}

# hold FILE NAME: NAME is this script's, and of what it starts, until the last of them has ended, since
# all of them inherit the locked file. A start that overlaps an earlier one, as when Slurm queues a job
# again, waits LOCK_WAIT_S for it.
hold() {
  local lock code told="" end=$((SECONDS + LOCK_WAIT_S))
  mkdir -p "$(dirname "$1")"
  exec {lock}>>"$1"
  while true; do
    code=0
    flock --nonblock "$lock" || code=$?
    [ $code != 0 ] || break
    wait_for_owner "$code" "$1" "$2" $end
  done
  echo "$$ on $HOSTNAME" >"$1"
}

# wait_for_owner CODE FILE NAME END: after flock ended with CODE, half a second; an error after END.
wait_for_owner() {
  local owner
  owner=$(cat "$2")
  [ "$1" = 1 ] || fail "$2 cannot be locked (flock ended with $1). run.root must be on a file system that knows locks."
  [ $SECONDS -lt "$4" ] || fail "$3 is in use by process ${owner:-unknown}. Wait for it, stop it, or set another run.name."
  [ -n "$told" ] || echo "note: $3 is in use by process ${owner:-unknown}; it gets up to $LOCK_WAIT_S s to end" >&2
  told=yes
  sleep 0.5
}

# Nothing of a run is touched before this has returned. Each node has a lock of its own; the run
# itself, which may have been started without a script, holds .lock.
hold_run() {
  [ -z "$DRY_RUN" ] || return 0
  local code told="" folder=$ROOT/$RUN end=$((SECONDS + LOCK_WAIT_S))
  hold "$folder/.lock.node$NODE_RANK" "$folder"
  while true; do
    code=0
    flock --nonblock --shared "$folder/.lock" true || code=$?
    [ $code != 0 ] || return 0
    wait_for_owner "$code" "$folder/.lock" "$folder" $end
  done
}

# find_node CONFIG [section.key=value ...]: sets NODES, DEVICES, PLATFORM, RUN, ROOT, NODE_RANK and
# HEAD_IP, and for Ray's processes the settings of this node.
find_node() {
  read -r NODES DEVICES PLATFORM RUN ROOT GRACE_S < <("$PYTHON" -m retool_mcore get "$@" cluster.nodes \
    cluster.gpus_per_node run.platform run.name run.root checkpoint.grace_s) || exit 2
  if [ "$NODES" = 1 ]; then
    NODE_RANK=0 HEAD_IP=${HEAD_IP:-127.0.0.1}
  elif [ -z "${NODE_RANK:-}" ] && [ -n "${SLURM_NODEID:-}" ]; then
    NODE_RANK=$SLURM_NODEID
    command -v scontrol >/dev/null || fail "cluster.nodes = $NODES, and scontrol, which names the first node of" \
      "SLURM_JOB_NODELIST, is not here. Set NODE_RANK and HEAD_IP on each node, or start launch/slurm.sbatch."
    HEAD_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
    HEAD_IP=$({ getent ahostsv4 "$HEAD_IP" || echo "$HEAD_IP"; } | awk 'NR == 1 {print $1}')  # Ray wants a number
  fi
  if [ -n "$DRY_RUN" ]; then NODE_RANK=${NODE_RANK:-0} HEAD_IP=${HEAD_IP:-HEAD_IP}; fi
  [ -n "${NODE_RANK:-}" ] && [ -n "${HEAD_IP:-}" ] ||
    fail "cluster.nodes = $NODES, and NODE_RANK and HEAD_IP are not both set. Set them on each node, or use Slurm."
  [ "$NODE_RANK" -lt "$NODES" ] 2>/dev/null ||
    fail "NODE_RANK = $NODE_RANK is not one of 0 to $((NODES - 1)), and cluster.nodes = $NODES."
  RETOOL_NODE_SETTINGS=$(realpath "$1" && shift && printf '%s\n' "$@")  # preflight compares them over Ray's nodes
  export RETOOL_NODE_SETTINGS
}

# start COMMAND...: in the background, in a process group of its own; it ends when this script does,
# however that ends.
start() {
  [ -z "$DRY_RUN" ] || { printf '%q ' "$@" >&3; echo "&" >&3; return; }
  setsid setpriv --pdeathsig TERM -- "$@" &
  started+=("$!")
}

# serve COMMAND...: the same for what is beside the run, and gets less time to end.
serve() {
  start "$@"
  [ -z "$DRY_RUN" ] || return 0
  services+=("${started[-1]}")
  unset 'started[-1]'
}

# run COMMAND...: starts it and waits. A run that ended by a fault, not by its user or a mistake of
# theirs, starts again up to RESTARTS times, each after twice the wait and the command AGAIN; it goes on
# from its checkpoint.
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
    "${AGAIN[@]}"
  done
}

stop_started() {
  trap - EXIT
  local i
  trap 'kill -TERM "${started[i]}" 2>/dev/null || true' INT TERM  # the second one: a run then ends at once
  for ((i = ${#started[@]} - 1; i >= 0; i--)); do  # the last one first
    # To the leader alone: a run saves within checkpoint.grace_s, with what it has started.
    if kill -TERM "${started[i]}" 2>/dev/null; then gone_within $((${GRACE_S%.*} + 20)) "${started[i]}" || true; fi
    kill -TERM -- "-${started[i]}" 2>/dev/null || continue
    gone_within 20 "-${started[i]}" || kill -KILL -- "-${started[i]}" 2>/dev/null || true
  done
  trap '' INT TERM  # what follows takes seconds, and must not be left half done
  for ((i = 0; i < ${#services[@]}; i++)); do kill -TERM -- "-${services[i]}" 2>/dev/null || true; done
  local end=$((SECONDS + 5))
  while [ $SECONDS -lt $end ]; do
    for ((i = 0; i < ${#services[@]}; i++)); do kill -0 -- "-${services[i]}" 2>/dev/null && { sleep 0.1; continue 2; }; done
    break
  done
  for ((i = 0; i < ${#services[@]}; i++)); do kill -KILL -- "-${services[i]}" 2>/dev/null || true; done
  [ -n "$DRY_RUN" ] || [ -z "$RAY_FOLDER" ] || rm -rf "$RAY_FOLDER"
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
# SANDBOX_OPTIONS adds options to its command. `curl --unix-socket` reads /health and /metrics.
# Sets SANDBOX_URL, and IN_SANDBOX: settings that are the service's from here on, not the run's.
start_sandbox() {
  local folder=${SANDBOX_DIR:-/tmp/retool-sandboxes-$(id -u)}/$RUN level workers python modules
  read -r level workers modules < <("$PYTHON" -m retool_mcore get "$@" sandbox.min_level sandbox.workers \
    sandbox.preload) || exit 2
  python=$("$PYTHON" -m retool_mcore get "$@" sandbox.python) || exit 2  # by itself: it may be empty
  IN_SANDBOX=(sandbox.python= "sandbox.preload=[]")
  SANDBOX_URL=unix://$folder/sandbox.sock
  local command=(bash launch/sandbox.sh --socket "$folder/sandbox.sock" --min-level "$level" --workers "$workers"
    --processes $(((workers + 15) / 16)) ${python:+--python "$python"} ${modules:+--preload ${modules// / --preload }}
    ${SANDBOX_OPTIONS:-})
  [ -z "$DRY_RUN" ] || { start "${command[@]}"; return; }
  (umask 077 && mkdir -p "$folder")
  [ -n "${SANDBOX_DIR:-}" ] || [ -O "${folder%/*}" ] || fail "${folder%/*} is another user's, who could answer in the" \
    "sandbox's place. Name a folder of yours in SANDBOX_DIR."
  hold "$folder/.lock" "$folder, the sandbox's folder,"  # runs of one name and several roots meet here
  rm -f "$folder/sandbox.sock"
  serve "${command[@]}" >"$folder/log" 2>&1
  for _ in $(seq 300); do [ -S "$folder/sandbox.sock" ] && return 0; kill -0 "${services[-1]}" 2>/dev/null || break; sleep 0.1; done
  fail "the sandbox of this node does not answer: $(tail -n 3 "$folder/log")"
}

# join_nodes CONFIG [section.key=value ...]: Ray over all nodes, for RL. Only node 0 returns, when all
# have joined; on one node the run starts a Ray of its own.
join_nodes() {
  [ "$NODES" -gt 1 ] || return 0
  start_ray
  serve_unless_head
  AGAIN=(step "$PYTHON" -m retool_mcore preflight "$@" --cluster --wait-s "$NODES_WAIT_S")  # every node: settings, code, data
  "${AGAIN[@]}"
}

# This node's part of the run's Ray cluster. Processes of the run get their environment from verl,
# not from here.
start_ray() {
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # when Ray is stopped the run has ended: there is nothing to move away
  export RAY_prestart_worker_first_driver=0  # a worker for each core, none with the run's runtime_env
  local resources place log=$ROOT/$RUN/logs/ray_node$NODE_RANK.log end=$((SECONDS + HEAD_WAIT_S))
  resources=(--num-gpus "$DEVICES")
  [ "$PLATFORM" = ascend ] && resources=(--resources "{\"NPU\": $DEVICES}")
  [ "$PLATFORM" = cpu ] && resources+=(--num-cpus 16)  # logical: actors that mostly wait
  [ -n "$DRY_RUN" ] || getent ahostsv4 "$HEAD_IP" >/dev/null || fail "HEAD_IP = $HEAD_IP has no IPv4 address, and the nodes" \
    "of Ray meet by one. Set HEAD_IP to an IPv4 address of node 0."
  share_ray_token
  make_ray_folder
  if [ "$NODE_RANK" = 0 ]; then
    [ -n "$DRY_RUN" ] || ! answers "$RAY_PORT" ||  # Ray itself would try for most of a minute
      fail "RAY_PORT = $RAY_PORT of $HEAD_IP is in use. Stop what listens there, or set another on every node."
    place=(--head --include-dashboard false --node-ip-address "$HEAD_IP" --port "$RAY_PORT")
  else
    wait_for_head "$RAY_PORT"
    place=(--address "$HEAD_IP:$RAY_PORT" ${NODE_IP:+--node-ip-address "$NODE_IP"})
  fi
  export RAY_ADDRESS=$HEAD_IP:$RAY_PORT
  local command=("$PYTHON" -m ray.scripts.scripts start "${place[@]}" --temp-dir "$RAY_FOLDER" --disable-usage-stats --block
    "${resources[@]}" ${RAY_START_OPTIONS:-})
  [ -z "$DRY_RUN" ] || { start "${command[@]}"; return; }
  mkdir -p "$(dirname "$log")"
  until ray_runs "$log" "${command[@]}"; do
    # The port of node 0 answers before Ray knows the node. Ray itself waits for it for 40 s.
    if [ "$NODE_RANK" != 0 ] && [ $SECONDS -lt $end ] && grep -q "No node info found for head node" "$log"; then continue; fi
    fail "Ray did not start on this node: $(grep -v '^ *$' "$log" | tail -n 1 | sed 's/\.$//'). All of what it said: $log"
  done
}

# ray_runs LOG COMMAND...: starts it and sets RAY_LEADER; fails when it has ended without a runtime.
ray_runs() {
  serve env -u RAY_ADDRESS PYTHONUNBUFFERED=1 "${@:2}" >"$1" 2>&1
  RAY_LEADER=${services[-1]}
  until grep -q "Ray runtime started" "$1"; do
    if ! kill -0 "$RAY_LEADER" 2>/dev/null; then
      kill -KILL -- "-$RAY_LEADER" 2>/dev/null || true  # what it has left
      unset 'services[-1]'
      return 1
    fi
    sleep 0.2
  done
}

# Ray keeps sockets, logs and the address of its cluster in a folder of this run's, which goes with
# it: in /tmp/ray every later program of this node would look for the cluster.
make_ray_folder() {
  local parent
  parent=/tmp/retool-ray-$(id -u)
  RAY_FOLDER=$parent/$(printf %s "$PWD/$ROOT/$RUN" | cksum | cut -d' ' -f1).$NODE_RANK  # short: 107 bytes is a socket's path
  [ -z "$DRY_RUN" ] || return 0
  mkdir -p -m 700 "$parent"
  [ -O "$parent" ] || fail "$parent belongs to another user, and Ray's sockets would be theirs to read. Remove it."
  rm -rf "$RAY_FOLDER"  # of a start that was killed
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

# A node that is not the first serves until node 0 leaves, which its port tells in seconds, Ray itself
# only after a minute. Where this node's Ray was lost, it joins again, up to RESTARTS times.
serve_unless_head() {
  [ "$NODE_RANK" != 0 ] || return 0
  [ -z "$DRY_RUN" ] || exit 0
  local left=0 lost=0 tries=0
  echo "node $NODE_RANK has joined $RAY_ADDRESS and serves until node 0 leaves" >&2
  while true; do
    sleep 1
    if answers "$RAY_PORT"; then left=0; else left=$((left + 1)); fi
    [ $left -lt 3 ] || { echo "node 0 has left" >&2; exit 0; }
    if [ $left = 0 ] && ! kill -0 "$RAY_LEADER" 2>/dev/null; then lost=$((lost + 1)); else lost=0; fi
    [ $lost -ge 3 ] || continue
    echo "Ray on this node has ended, and node 0 goes on: $(grep -v '^ *$' "$ROOT/$RUN/logs/ray_node$NODE_RANK.log" | tail -n 1)" >&2
    [ $tries -lt "$RESTARTS" ] || exit 3
    tries=$((tries + 1)) lost=0
    kill -KILL -- "-$RAY_LEADER" 2>/dev/null || true
    unset 'services[-1]'
    start_ray
    echo "node $NODE_RANK has joined again, $tries of RESTARTS = $RESTARTS" >&2
  done
}

# answers PORT: whether node 0 takes a connection there.
answers() { timeout 2 bash -c "exec 3<>/dev/tcp/$HEAD_IP/$1" 2>/dev/null; }

wait_for_head() {
  [ -z "$DRY_RUN" ] || return 0
  local end=$((SECONDS + HEAD_WAIT_S))
  until answers "$1"; do
    [ $SECONDS -lt $end ] || fail "HEAD_IP = $HEAD_IP does not answer on port $1 within $HEAD_WAIT_S s. Start node 0 first," \
      "check the address and the firewall, or set HEAD_WAIT_S."
    sleep 0.5
  done
}

# run_ranks PROGRAM CONFIG [section.key=value ...]: SFT, this node's ranks of it.
run_ranks() {
  [ "$NODE_RANK" = 0 ] || wait_for_head "$TORCH_PORT"
  AGAIN=(let_head_leave)
  run "$PYTHON" -m retool_mcore.cli.torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$DEVICES" \
    --master-addr "$HEAD_IP" --master-port "$TORCH_PORT" --rdzv-conf "timeout=$NODES_WAIT_S" "$@"
}

# When a rank was lost, all nodes end and meet anew. A node that is quicker than node 0 must not meet
# the old one; so it waits for the port to close, half of the time that node 0 will wait for it.
let_head_leave() {
  [ "$NODE_RANK" != 0 ] || return 0
  local end=$((SECONDS + NODES_WAIT_S / 2))
  while [ $SECONDS -lt $end ] && answers "$TORCH_PORT"; do sleep 0.5; done
}
