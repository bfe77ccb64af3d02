# Sourced on each Ascend node: what must be set before Python starts. All else is the platform's:
# ascend/adapter.py.
ulimit -n "$(ulimit -Hn)"                                       # Ray and vLLM hold a file per connection
cann=${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}
for script in "$cann/../set_env.sh" "$cann/../../nnal/atb/set_env.sh"; do
  if [ -f "$script" ]; then set +u; source "$script"; set -u; else echo "note: $script is not there" >&2; fi
done
for library in /usr/local/lib/libjemalloc.so.2 "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2; do
  # Guide: the host's allocator is busy with many small pieces. It must be loaded before the
  # program.
  if [ -f "$library" ]; then export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}; break; fi
done
[ -n "${SOCKET_IFNAME:-}" ] && export HCCL_SOCKET_IFNAME=$SOCKET_IFNAME GLOO_SOCKET_IFNAME=$SOCKET_IFNAME
true
