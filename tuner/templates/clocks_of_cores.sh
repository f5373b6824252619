setter=write
put() { printf '%s\n' "$2" | ${SUDO:-} tee "$1"; }
put_back() { put "$@"; }

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
    back=("$1 $(<"$1")" "${back[@]}")
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
