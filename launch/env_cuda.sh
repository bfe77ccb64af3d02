# Source this on each CUDA node. It sets what must be set before Python starts; retool_mcore/platforms/cuda
# sets everything else.
ulimit -n "$(ulimit -Hn)"                                       # Ray and SGLang use a descriptor per connection
[ -n "${SOCKET_IFNAME:-}" ] && export NCCL_SOCKET_IFNAME=$SOCKET_IFNAME GLOO_SOCKET_IFNAME=$SOCKET_IFNAME
true
