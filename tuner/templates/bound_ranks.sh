# Under offload each rank was measured on cores of its own near its GPU, or unbound where
# torch could not bind it, as is asked here. BIND= starts ranks that are not bound.
bind="${BIND---numa-binding=@MODE@}"
if [[ -n $bind ]] && own=$("$python" -c "import sys, torch.numa.binding as b; o = b.NumaOptions(b.AffinityMode('@MODE@')); print(min(len(b._get_validated_logical_cpus_to_bind_to(gpu_index=i, numa_options=o)) for i in range(int(sys.argv[1]))))" @RANKS@ 2>/dev/null); then
    (( own >= OMP_NUM_THREADS )) || OMP_NUM_THREADS=$own
else
    bind=""
fi
