"""How an answer is drawn: the report's parts, its figures, and what a notebook shows."""
