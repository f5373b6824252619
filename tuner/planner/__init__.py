"""What is predicted before anything runs: plans, whether a job fits, and what it costs."""
