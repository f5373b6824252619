"""The built-in training program as a job, and the modules that its ranks run."""
