"""Contract tests that a plug-in inherits: of `meters`, `platforms` and governors of `clocks`."""
