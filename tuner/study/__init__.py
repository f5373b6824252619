"""One session of a study, and its records."""
