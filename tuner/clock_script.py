"""clocks.sh: runs a command under a configuration's clocks and puts the earlier ones back.

A plain shell script over nvidia-smi, so that it works where joulefront is not installed. It puts
back when the command ends, fails or is interrupted (a trap), and a guard in a session of its own
does so when the script itself is killed with SIGKILL. nvidia-smi tells an earlier power limit but
no earlier clock lock: a lock is released unless EARLIER_CLOCKS_MHZ names the one to put back.
"""

from __future__ import annotations

from search_spaces.configuration import Configuration
from search_spaces.knobs import Value

__all__ = ["clocks_sh"]

_SCRIPT = r"""#!/usr/bin/env bash
# Runs a command under the live settings of this configuration, and puts the earlier ones back when
# it ends, however it ends:
#   ./clocks.sh ./launch.sh
# Setting clocks needs the right to: as root, or SUDO=sudo ./clocks.sh ./launch.sh
# nvidia-smi cannot tell an earlier clock lock; EARLIER_CLOCKS_MHZ=MIN,MAX names one to put back.
# Settings: @ABOUT@
set -uo pipefail

clocks_MHz=(@CLOCKS@)         # one for all GPUs, or one a pipeline stage; empty: left alone
memory_clocks_MHz=(@MEMORY@)
power_limits_W=(@LIMITS@)
ranks=@RANKS@                 # of the job, in blocks of stages
ranks_per_node=@PER_NODE@

smi() { ${SUDO:-} "${NVIDIA_SMI:-nvidia-smi}" "$@"; }

put_back() {  # each argument is one call: words for nvidia-smi
    local failed=0 words
    for words in "$@"; do
        # shellcheck disable=SC2086  # words are to be split
        if ! smi $words >/dev/null; then
            echo "clocks.sh: not put back: nvidia-smi $words" >&2
            failed=1
        fi
    done
    return $failed
}

if [[ ${1:-} == --guard ]]; then  # in a session of its own: clocks.sh --guard PID WORDS...
    main=$2
    shift 2
    trap '' INT TERM HUP
    while state=$(ps -o stat= -p "$main") && [[ $state != Z* ]]; do sleep 0.5; done
    put_back "$@"
    exit
fi

if (( $# == 0 )); then
    echo "usage: ./clocks.sh COMMAND ...   (for example ./clocks.sh ./launch.sh)" >&2
    exit 2
fi
if (( ${#clocks_MHz[@]} + ${#memory_clocks_MHz[@]} + ${#power_limits_W[@]} == 0 )); then
    exec "$@"
fi

if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -r -a gpus <<< "$CUDA_VISIBLE_DEVICES"
else
    mapfile -t gpus < <("${NVIDIA_SMI:-nvidia-smi}" --query-gpu=index --format=csv,noheader)
fi
if (( ${#gpus[@]} < ranks_per_node )); then
    echo "clocks.sh: ${#gpus[@]} GPUs are visible and the job has $ranks_per_node ranks here" >&2
    exit 2
fi
gpus=("${gpus[@]:0:ranks_per_node}")
node=${SLURM_NODEID:-${NODE_RANK:-0}}

of_gpu() {  # value of one GPU: of_gpu NUMBER VALUES...
    local rank=$(( node * ranks_per_node + $1 ))
    shift
    echo "${@:$(( rank / (ranks / $#) + 1 )):1}"
}

back=()
set_to=()
for number in "${!gpus[@]}"; do
    gpu=${gpus[number]}
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
        limit=$("${NVIDIA_SMI:-nvidia-smi}" -i "$gpu" --query-gpu=power.limit \
            --format=csv,noheader,nounits) || limit=
        if [[ ! $limit =~ ^[0-9.]+$ ]]; then
            echo "clocks.sh: GPU $gpu tells no power limit, so it could not be put back" >&2
            exit 3
        fi
        set_to+=("-i $gpu -pl $(of_gpu "$number" "${power_limits_W[@]}")")
        back+=("-i $gpu -pl $limit")
    fi
done

child=
stopped=
finish() {
    local code=$?
    trap '' INT TERM HUP
    trap - EXIT
    [[ -z $child ]] || kill -TERM "$child" 2>/dev/null
    put_back "${back[@]}" && [[ -n ${guard:-} ]] && kill -KILL "$guard" 2>/dev/null
    exit "$code"
}
trap finish EXIT
trap '[[ -z $child ]] || kill -TERM "$child" 2>/dev/null; stopped=143' INT TERM HUP

# Before anything is touched: whoever kills this script cannot kill what puts back.
setsid bash "${BASH_SOURCE[0]}" --guard "$$" "${back[@]}" </dev/null >/dev/null 2>&1 &
guard=$!
for words in "${set_to[@]}"; do
    # shellcheck disable=SC2086  # words are to be split
    if ! smi $words >/dev/null; then
        echo "clocks.sh: nvidia-smi $words was refused; nothing is started. With the right to" \
            "set clocks: SUDO=sudo ./clocks.sh ...; without it start the command alone" >&2
        exit 3
    fi
done

[[ -z $stopped ]] || exit "$stopped"
"$@" &
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


def _array(value: Value | None) -> str:
    """A live knob's value as the words of a bash array."""
    if value is None:
        return ""
    parts = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{part:g}" if isinstance(part, float) else str(int(part)) for part in parts)


def clocks_sh(configuration: Configuration, ranks_per_node: int) -> str:
    """The script of one configuration; it only starts the command where no live knob is set.

    Args:
        configuration: its live half is set.
        ranks_per_node: ranks, and so GPUs, on each node.
    """
    live = configuration.live
    words = {
        "@ABOUT@": live.key if live else "left to the device",
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
