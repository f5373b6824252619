"""A chosen configuration in production, and a run as one file for others."""
