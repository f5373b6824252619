setter=write
write() { printf '%s\n' "$2" | ${SUDO:-} tee "$1"; }

near() { (( $1 >= $2 - $2 / 50 && $1 <= $2 + $2 / 50 )); }  # files read back in hardware's steps

put() {  # put FILE VALUE; the kernel may hold a clock lower against heat, and takes no other value
    local before now
    before=$(<"$1") && write "$@" && now=$(<"$1") || return
    ! near "$now" "$2" || return 0
    [[ $1 != */cpufreq/* ]] || (( now > $2 )) || return 0
    write "$1" "$before"
    return 1
}

put_back() {  # put_back FILE EARLIER OURS; what others wrote meanwhile stays
    local now
    now=$(<"$1") || return
    [[ $now != "$2" ]] || return 0
    if [[ $now =~ ^[0-9]+$ ]] && ! near "$now" "$3"; then
        if [[ $1 == */cpufreq/* ]] && (( now < $3 )); then  # held against heat, or another's
            write "$1" "$2" || return
            [[ $(<"$1") != "$now" ]] || return 0  # the kernel holds it, whatever is written
            write "$1" "$now"
        fi
        echo "clocks.sh: $1 stays at $now, which another process has written" >&2
        return 0
    fi
    write "$1" "$2"
}

@COLLECT@
read_back() { :; }  # the kernel forgets nothing
if (( ${#clocks_MHz[@]} > 1 || ${#power_limits_W[@]} > 1 )); then
    echo "clocks.sh: cores take one value for all; tuner run sets one per stage" >&2
    exit 2
fi
sys=${SYSFS:-/sys}
back=()
set_to=()
change() {  # change FILE VALUE; the last change is restored first
    back=("$1 $(<"$1") $2" "${back[@]}")
    set_to+=("$1 $2")
}
if (( ${#clocks_MHz[@]} )); then
    for policy in "$sys"/devices/system/cpu/cpufreq/policy*; do
        clock_kHz=$(( clocks_MHz[0] * 1000 ))
        (( $(<"$policy/scaling_min_freq") <= clock_kHz )) ||
            change "$policy/scaling_min_freq" "$clock_kHz"
        change "$policy/scaling_max_freq" "$clock_kHz"
    done
fi
if (( ${#power_limits_W[@]} )); then
    for zone in "$sys"/class/powercap/intel-rapl:*; do
        [[ $(<"$zone/name") =~ ^package-[0-9]+$ ]] || continue
        limit_uW=$(LC_ALL=C awk "BEGIN { printf \"%.0f\", ${power_limits_W[0]} * 1e6 }")
        for term in "$zone"/constraint_*_name; do
            [[ $(<"$term") =~ ^(long|short)_term$ ]] || continue
            file=${term%_name}_power_limit_uw
            (( $(<"$file") <= limit_uW )) || change "$file" "$limit_uW"
        done
        [[ $(<"$zone/enabled") == 1 ]] || change "$zone/enabled" 1
    done
fi
if (( ${#set_to[@]} == 0 )); then
    echo "clocks.sh: this machine has no such clocks or power caps; nothing is started" >&2
    exit 3
fi
