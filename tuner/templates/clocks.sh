#!/usr/bin/env bash
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
        if ! put_back $words >/dev/null && [[ $words != *" -pm 0" ]]; then
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
[[ -z $stopped ]] || kill -TERM "$child" 2>/dev/null  # the signal came before its number was known
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do  # a signal ends `wait` before the command has ended
    wait "$child"
    code=$?
done
child=
exit "${stopped:-$code}"
