"""Plans: every configuration of a space predicted at once by the analytic models."""
