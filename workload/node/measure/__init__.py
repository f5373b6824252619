"""Windows and what they measure: step times, power, phases and their statistics."""
