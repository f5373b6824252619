"""Search cost in joules until the front of a recorded table is found."""
