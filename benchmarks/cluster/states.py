"""`false_sentences`: wrong states of a cluster about which joining it says what is not so."""

from __future__ import annotations

from benchmarks.figures import Figure
from tests.cluster.joining_states import false_sentences


def figures() -> list[Figure]:
    """Return the number of false sentences, and print them."""
    found = false_sentences()
    print("\n".join(found) or "each state is told as it is")
    return [Figure("false_sentences", len(found), "count")]
