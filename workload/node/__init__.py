"""Running a probe on one node: the runner, the ranks and the machine."""
