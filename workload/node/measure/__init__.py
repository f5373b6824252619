"""Windows and their measurements: step times, power, phases and their statistics."""
