"""Analytic models of step time, memory and power."""
