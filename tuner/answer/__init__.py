"""The answer: plans by the models, and of a study estimates, front, choice and explanation."""
