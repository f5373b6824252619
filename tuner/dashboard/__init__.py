"""A run's study in optuna-dashboard: an extra that brings the command `tuner dashboard`."""
