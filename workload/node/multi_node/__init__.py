"""Running a probe on several nodes as one."""
