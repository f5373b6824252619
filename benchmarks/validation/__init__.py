"""Comparisons of the models with published figures (`benchmarks.published`), and with recorded
tables and simulated clusters (`benchmarks.prediction`).
"""
