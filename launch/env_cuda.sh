# Source this on each CUDA node. It sets everything that must be set before Python starts;
# retool_mcore/platforms/cuda sets the rest.
ulimit -n "$(ulimit -Hn)"                                       # Ray and SGLang use a descriptor per connection
[ -n "${SOCKET_IFNAME:-}" ] && export NCCL_SOCKET_IFNAME=$SOCKET_IFNAME GLOO_SOCKET_IFNAME=$SOCKET_IFNAME
true
