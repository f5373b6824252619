"""Measurement of any command, which runs as it stands, and the receipt of its energy."""
