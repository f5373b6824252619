"""Surrogates of step time and power fitted to measurements."""
