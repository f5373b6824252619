if [ "${program[0]}" = @PROGRAM@ ] \
    && [ "$steps" -gt @MOST@ ] && [ "${SYNTHETIC:-0}" != 1 ]; then
  echo "@FILE@: no script was given, so this trains SYNTHETIC DATA; put the command of your own training in program= of @FILE@, or tune it: tuner optimize --script '...'. A try: STEPS=20 ./@FILE@. All $steps steps of it: SYNTHETIC=1 ./@FILE@" >&2
  exit 2
fi
