"""Runs as files for others: the import of CSV files, and exports of a run."""
