if [ "${program[0]}" = @PROGRAM@ ] \
    && [ "$steps" -gt @MOST@ ] && [ "${SYNTHETIC:-0}" != 1 ]; then
  echo "launch.sh: no script was given, so this trains SYNTHETIC DATA; put the command of your own training in program= of launch.sh, or tune it: tuner optimize --script '...'. A try: STEPS=20 ./launch.sh. All $steps steps of it: SYNTHETIC=1 ./launch.sh" >&2
  exit 2
fi
