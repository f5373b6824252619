setter=nvidia-smi
put() { ${SUDO:-} "${NVIDIA_SMI:-nvidia-smi}" "$@"; }

ask() {  # ask GPU FIELD
    "${NVIDIA_SMI:-nvidia-smi}" -i "$1" --query-gpu="$2" --format=csv,noheader,nounits
}

put_back() {  # put_back WORDS; a limit is followed by the one set here, and what others set stays
    local limit
    if [[ $3 == -pl ]] && limit=$(ask "$2" power.limit) && [[ $limit =~ ^[0-9.]+$ ]] &&
        (( ${limit%.*} != ${5%.*} )); then
        (( ${limit%.*} == ${4%.*} )) ||
            echo "clocks.sh: GPU $2 keeps a power limit of $limit W, which another has set" >&2
        return 0
    fi
    put "${@:1:4}"
}

@COLLECT@
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
persisted=()
node=${SLURM_NODEID:-${NODE_RANK:-0}}

of_gpu() {  # value of one GPU: of_gpu NUMBER VALUES...
    local rank=$(( node * ranks_per_node + $1 ))
    shift
    echo "${@:$(( rank / (ranks / $#) + 1 )):1}"
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
        wanted=$(of_gpu "$number" "${power_limits_W[@]}")
        set_to+=("-i $gpu -pl $wanted")
        back+=("-i $gpu -pl $limit $wanted")
    fi
done
back+=("${persisted[@]}")  # last: without it the rest may be forgotten
