"""Bad input drawn at random, and what the readers and the command make of it."""
