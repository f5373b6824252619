"""A user's own training script as a job."""
