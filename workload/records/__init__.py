"""Records of probes: what is asked and measured, traces, tables, replay, and limits."""
