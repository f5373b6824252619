"""Extra: Ray, and probes on several nodes as one."""
