"""Extra: recorded tables and traces, and searches that they answer in place of real probes."""
