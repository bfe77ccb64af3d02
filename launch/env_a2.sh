# Source this on each Ascend node. It sets everything that must be set before Python starts;
# ascend/adapter.py sets the rest.
ulimit -n "$(ulimit -Hn)"                                       # Ray and vLLM use a descriptor per connection
cann=${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}
# In CANN 8, set_env.sh is in ascend-toolkit/, the parent of `latest`. In CANN 9, it is in cann/, a link to
# cann-9.1.0. Parents are derived from the path's text, because `latest` may also be a link, and ".." would
# then be the parent of its target.
cann=${cann%/} above=${cann%/*}
root=${above%/ascend-toolkit}
for scripts in "$cann/set_env.sh:$above/set_env.sh:$root/ascend-toolkit/set_env.sh:$root/cann/set_env.sh" \
               "$root/nnal/atb/set_env.sh"; do
  found=
  IFS=: read -ra scripts <<<"$scripts"
  for script in "${scripts[@]}"; do [ -f "$script" ] && { found=$script; break; }; done
  if [ -n "$found" ]; then set +u; source "$found"; set -u; else echo "note: found none of ${scripts[*]}" >&2; fi
done
for library in /usr/local/lib/libjemalloc.so.2 "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2; do
  # From the tuning guide: the host makes many small allocations, for which jemalloc is faster. It must be
  # preloaded before the program starts.
  if [ -f "$library" ]; then export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}; break; fi
done
[ -n "${SOCKET_IFNAME:-}" ] && export HCCL_SOCKET_IFNAME=$SOCKET_IFNAME GLOO_SOCKET_IFNAME=$SOCKET_IFNAME
true
