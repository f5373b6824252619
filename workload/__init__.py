"""The workload: jobs, meters, clocks, and the probes that measure training on this machine."""
