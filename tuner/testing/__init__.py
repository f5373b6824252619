"""Contract tests that a plug-in inherits: a meter of the user's own (`meters`)."""
