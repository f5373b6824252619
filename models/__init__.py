"""Models of step time, power and memory: analytic, fitted to measurements, and simulated."""
