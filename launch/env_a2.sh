# Sourced on each Ascend node: what must be set before Python starts. All else is the platform's:
# ascend/adapter.py.
ulimit -n "$(ulimit -Hn)"                                       # Ray and vLLM hold a file per connection
cann=${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}
# CANN 8 is ascend-toolkit/latest with the script above it; CANN 9 is cann, a link to cann-9.1.0, with the script
# in it. Folders above are found by name, because `latest` may be a link, too, and ".." would leave its target.
cann=${cann%/} above=${cann%/*}
root=${above%/ascend-toolkit}
for scripts in "$cann/set_env.sh:$above/set_env.sh:$root/ascend-toolkit/set_env.sh:$root/cann/set_env.sh" \
               "$root/nnal/atb/set_env.sh"; do
  found=
  IFS=: read -ra scripts <<<"$scripts"
  for script in "${scripts[@]}"; do [ -f "$script" ] && { found=$script; break; }; done
  if [ -n "$found" ]; then set +u; source "$found"; set -u; else echo "note: $script is not there" >&2; fi
done
for library in /usr/local/lib/libjemalloc.so.2 "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2; do
  # Guide: the host's allocator is busy with many small pieces. It must be loaded before the
  # program.
  if [ -f "$library" ]; then export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}; break; fi
done
[ -n "${SOCKET_IFNAME:-}" ] && export HCCL_SOCKET_IFNAME=$SOCKET_IFNAME GLOO_SOCKET_IFNAME=$SOCKET_IFNAME
true
