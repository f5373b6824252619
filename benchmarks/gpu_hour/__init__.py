"""First hour on a borrowed GPU (docs/develop/gpu-hour.md)."""
