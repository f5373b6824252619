"""Search: the next launch and live settings to probe."""
