"""One session of a study, and what it records."""
