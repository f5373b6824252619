"""Figures of the report and the notebook."""
