"""Contract tests of the sockets, which a plug-in's tests inherit."""
