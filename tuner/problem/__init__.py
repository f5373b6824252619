"""The question of a study: job, cluster, candidates, constraints and settings."""
