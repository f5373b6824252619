"""The answer of a study: estimates, front, choice, verification and explanation."""
