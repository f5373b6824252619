cores=$(nproc)
group=$(sed -n 's/^0:://p' "${PROC:-/proc}/self/cgroup" 2>/dev/null)
while :; do
    if read -r quota period 2>/dev/null < "${CGROUP:-/sys/fs/cgroup}${group%/}/cpu.max" &&
        [[ $quota != max ]] && (( quota / period < cores )); then
        cores=$(( quota / period ))
    fi
    [[ -n ${group%/} ]] || break
    group=${group%/*}
done
