"""Records of probes: requests and measurements, traces, tables, replay, and limits."""
