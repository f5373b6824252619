"""Shell script clocks.sh, which runs a command under a configuration's clocks.

It is a plain script over nvidia-smi, or over the kernel's files where cores are the devices, so
that it works where joulefront is not installed. It
restores the earlier clocks when the command ends, fails or is interrupted (a trap), and a guard in
a session of its own restores them when the script itself is killed with SIGKILL. nvidia-smi reports
an earlier power limit but no earlier clock lock: a lock is released unless EARLIER_CLOCKS_MHZ gives
the one to restore. A GPU without persistence mode forgets its settings when no process uses it, for
instance between nvidia-smi and the command, so persistence mode is on for as long as the command
runs (NVIDIA, "Driver Persistence").
"""

from __future__ import annotations

from tuner.formatting import one_line
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knobs import KNOBS, Value

_SCRIPT = r"""#!/usr/bin/env bash
# Runs a command under the live settings of this configuration, and restores the earlier ones when
# it ends, in whatever way:
#   ./clocks.sh ./launch.sh
# Setting clocks needs permission: run it as root, or SUDO=sudo ./clocks.sh ./launch.sh
# nvidia-smi does not report an earlier clock lock; EARLIER_CLOCKS_MHZ=MIN,MAX restores that one.
# Settings: @ABOUT@
set -uo pipefail

clocks_MHz=(@CLOCKS@)         # one for all devices, or one per pipeline stage; empty: unchanged
memory_clocks_MHz=(@MEMORY@)
power_limits_W=(@LIMITS@)
ranks=@RANKS@                 # of the whole job, in blocks of stages
ranks_per_node=@PER_NODE@

@SETTER@

restore() {  # each argument is one call: words for $setter
    local failed=0 words
    for words in "$@"; do
        # shellcheck disable=SC2086  # word splitting is intended
        if ! put $words >/dev/null && [[ $words != *" -pm 0" ]]; then
            echo "clocks.sh: not restored: $setter $words" >&2
            failed=1
        fi
    done
    return $failed
}

if [[ ${1:-} == --guard ]]; then  # in a session of its own: clocks.sh --guard WORDS...
    shift
    trap '' INT TERM HUP
    while read -r; do :; done  # the pipe closes when the script ends, in whatever way
    restore "$@"
    exit
fi

if (( $# == 0 )); then
    echo "usage: ./clocks.sh COMMAND ...   (for example ./clocks.sh ./launch.sh)" >&2
    exit 2
fi
if (( ${#clocks_MHz[@]} + ${#memory_clocks_MHz[@]} + ${#power_limits_W[@]} == 0 )); then
    exec "$@"
fi

@COLLECT@
child=
stopped=
finish() {
    local code=$?
    trap '' INT TERM HUP
    trap - EXIT
    [[ -z $child ]] || kill -TERM "$child" 2>/dev/null
    restore "${back[@]}" && [[ -n ${guard:-} ]] && kill -KILL "$guard" 2>/dev/null
    exit "$code"
}
trap finish EXIT
trap '[[ -z $child ]] || kill -TERM "$child" 2>/dev/null; stopped=143' INT TERM HUP

# Started before any clock is set, in a session that a kill of this script does not reach.
# It reads from a pipe that is open for writing in this script, and not in the command.
exec {alive}> >(exec setsid bash "${BASH_SOURCE[0]}" --guard "${back[@]}" >/dev/null 2>&1)
guard=$!
for words in "${set_to[@]}"; do
    # shellcheck disable=SC2086  # word splitting is intended
    if ! put $words >/dev/null; then
        [[ $words != *" -pm 1" ]] || continue  # another process may hold the GPU: `read_back` says
        echo "clocks.sh: $setter $words was refused; nothing is started. To set clocks" \
            "as root: SUDO=sudo ./clocks.sh ...; or start the command without clocks.sh" >&2
        exit 3
    fi
done

[[ -z $stopped ]] || exit "$stopped"
exec {ended}> >(exec {alive}>&-; read_back)  # this pipe closes likewise
"$@" {alive}>&- {ended}>&- &
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do  # a signal ends `wait` before the command has ended
    wait "$child"
    code=$?
done
child=
exit "${stopped:-$code}"
"""


#: How GPUs are set, ...
_GPU_SETTER = r"""setter=nvidia-smi
put() { ${SUDO:-} "${NVIDIA_SMI:-nvidia-smi}" "$@"; }"""

_GPUS = r"""if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -r -a gpus <<< "$CUDA_VISIBLE_DEVICES"
else
    mapfile -t gpus < <("${NVIDIA_SMI:-nvidia-smi}" --query-gpu=index --format=csv,noheader)
fi
if (( ${#gpus[@]} < ranks_per_node )); then
    echo "clocks.sh: ${#gpus[@]} GPUs are visible and the job has $ranks_per_node ranks here" >&2
    exit 2
fi
gpus=("${gpus[@]:0:ranks_per_node}")
persisted=()
node=${SLURM_NODEID:-${NODE_RANK:-0}}

of_gpu() {  # value of one GPU: of_gpu NUMBER VALUES...
    local rank=$(( node * ranks_per_node + $1 ))
    shift
    echo "${@:$(( rank / (ranks / $#) + 1 )):1}"
}

ask() {  # ask GPU FIELD
    "${NVIDIA_SMI:-nvidia-smi}" -i "$1" --query-gpu="$2" --format=csv,noheader,nounits
}

read_back() {  # once the command trains: a GPU may have lost its settings
    trap - EXIT INT TERM HUP
    local words gpu option value clock limit
    read -rt "${READ_BACK_S:-60}"
    (( $? > 128 )) || return  # the script has ended, and the settings are restored
    for words in "${set_to[@]}"; do
        read -r _ gpu option value <<< "$words"
        case $option in
        -lgc) clock=$(ask "$gpu" clocks.sm) && [[ $clock =~ ^[0-9]+$ ]] &&
            (( clock > ${value#*,} + 15 )) &&
            echo "clocks.sh: GPU $gpu runs at $clock MHz, above its lock at ${value#*,} MHz" >&2 ;;
        -pl) limit=$(ask "$gpu" power.limit) && [[ $limit =~ ^[0-9.]+$ ]] &&
            (( ${limit%.*} != ${value%.*} )) &&
            echo "clocks.sh: GPU $gpu has a power limit of $limit W, not $value W" >&2 ;;
        esac
    done
}

back=()
set_to=()
for number in "${!gpus[@]}"; do
    gpu=${gpus[number]}
    if [[ $(ask "$gpu" persistence_mode) == Disabled ]]; then
        set_to+=("-i $gpu -pm 1")
        persisted+=("-i $gpu -pm 0")
    fi
    if (( ${#clocks_MHz[@]} )); then
        clock=$(of_gpu "$number" "${clocks_MHz[@]}")
        set_to+=("-i $gpu -lgc $clock,$clock")
        back+=("-i $gpu ${EARLIER_CLOCKS_MHZ:+-lgc $EARLIER_CLOCKS_MHZ}")
        [[ -n ${EARLIER_CLOCKS_MHZ:-} ]] || back[-1]="-i $gpu -rgc"
    fi
    if (( ${#memory_clocks_MHz[@]} )); then
        clock=$(of_gpu "$number" "${memory_clocks_MHz[@]}")
        set_to+=("-i $gpu -lmc $clock,$clock")
        back+=("-i $gpu -rmc")
    fi
    if (( ${#power_limits_W[@]} )); then
        limit=$(ask "$gpu" power.limit) || limit=
        if [[ ! $limit =~ ^[0-9.]+$ ]]; then
            echo "clocks.sh: GPU $gpu reports no power limit, so it could not be restored" >&2
            exit 3
        fi
        set_to+=("-i $gpu -pl $(of_gpu "$number" "${power_limits_W[@]}")")
        back+=("-i $gpu -pl $limit")
    fi
done
back+=("${persisted[@]}")  # last: without it the rest may be forgotten"""

#: ... and how cores are: the files of cpufreq and RAPL, as `tuner.workload.clocks.cpu` writes them.
_CORE_SETTER = r"""setter=write
put() { printf '%s\n' "$2" | ${SUDO:-} tee "$1"; }"""

_CORES = r"""read_back() { :; }  # the kernel forgets nothing
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
fi"""


def _array(value: Value | None) -> str:
    """Return a live knob's value as the words of a bash array."""
    if value is None:
        return ""
    parts = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{part:g}" if isinstance(part, float) else str(int(part)) for part in parts)


def clock_settings(configuration: Configuration) -> Settings:
    """Return the live settings that clocks.sh sets, without the knobs that the user declares."""
    live = configuration.live
    return Settings({name: value for name, value in live.items() if name in KNOBS})


def clocks_sh(configuration: Configuration, ranks_per_node: int, *, cores: bool = False) -> str:
    """Return the script of one configuration; without live settings it only runs the command."""
    live = clock_settings(configuration)
    words = {
        "@SETTER@": _CORE_SETTER if cores else _GPU_SETTER,
        "@COLLECT@": _CORES if cores else _GPUS,
        "@ABOUT@": one_line(live.short) if live else "left to the device",
        "@CLOCKS@": _array(live.get("clock_MHz")),
        "@MEMORY@": _array(live.get("memory_clock_MHz")),
        "@LIMITS@": _array(live.get("power_limit_W")),
        "@RANKS@": str(configuration.world_size),
        "@PER_NODE@": str(ranks_per_node),
    }
    text = _SCRIPT
    for name, value in words.items():
        text = text.replace(name, value)
    return text
