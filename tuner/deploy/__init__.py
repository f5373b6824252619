"""A chosen configuration in production: launch files, clocks, training and drift."""
