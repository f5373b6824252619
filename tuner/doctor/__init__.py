"""Extra: what a machine offers and lacks (`tuner doctor`), and tools to develop with."""
