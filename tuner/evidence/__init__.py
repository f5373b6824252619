"""Evidence of a run for others: one file that is opened, checked and replayed elsewhere."""
