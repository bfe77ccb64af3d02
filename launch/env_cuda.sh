# Sourced on each CUDA node: what must be set before Python starts. All else is the platform's:
# retool_mcore/platforms/cuda.
ulimit -n "$(ulimit -Hn)"                                       # Ray and SGLang hold a file per connection
[ -n "${SOCKET_IFNAME:-}" ] && export NCCL_SOCKET_IFNAME=$SOCKET_IFNAME GLOO_SOCKET_IFNAME=$SOCKET_IFNAME
true
