"""Levels of verification's tests, so that all of them together make at most 5 % of errors.

The 5 % are divided among the candidates that are tried one after the other, and each candidate's
share among the looks at its launches. How depends on the number of pairs of launches that the
limits have room for, declared before the first launch (DeMets & Lan 1994, "Interim analysis: the
alpha spending function approach", Statistics in Medicine): with room for all, looks have a constant
nominal level (Pocock 1977, "Group sequential methods in the design and analysis of clinical
trials"). With room for fewer, the first candidate is probably the only one and the last planned
look its only good one, so these get most. Something is kept for the looks that higher limits may
add later.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.problem.settings import MOST_PAIRS

__all__ = ["LEAST_PAIRS", "LEVEL", "MOST_TRIES", "look_level", "with_plan"]

#: One-sided error of all tests of one verification.
LEVEL = 0.05
#: Pairs of launches below which nothing is concluded.
LEAST_PAIRS = 2
#: Shares of the error that the first, second and third candidate may spend. The first has the most,
#: since it is the most promising; after the last, the baseline is chosen.
ATTEMPT_SHARES = (0.6, 0.3, 0.1)
MOST_TRIES = len(ATTEMPT_SHARES)
#: The same with room for fewer than `MOST_PAIRS` pairs. The first may spend `LATER_SHARE` more on
#: looks beyond the planned ones.
FEW_PAIRS_SHARES, LATER_SHARE = (0.8, 0.05, 0.05), 0.1
#: Nominal level of each look at 2 to `MOST_PAIRS` pairs, over the level of all looks together. The
#: exact share, by two million simulated t statistics, is 0.202 at 0.25 % and rises to 0.248 at 3 %
#: (tests/results/test_alpha_spending.py repeats it).
LOOK_SHARE = 0.2


def _last_look_share(planned: int) -> float:
    """Return the nominal share of the last of fewer than `MOST_PAIRS` planned looks.

    Those before it have `LOOK_SHARE`. By simulation as for `LOOK_SHARE`: 0.95 at two pairs, and 0.1
    less for each further pair.
    """
    return 0.95 - 0.1 * (planned - LEAST_PAIRS)


def look_level(rank: int, pairs: int, planned: Sequence[int]) -> float:
    """Return the one-sided level of the look at one candidate's launches, all quantities together.

    Args:
        rank: number of candidates that were tried before it.
        pairs: pairs of launches that are compared.
        planned: pairs that there was room for when each candidate's verification began; of those
            that are missing (an older release) `MOST_PAIRS`.
    """
    plans = [*planned, *[MOST_PAIRS] * MOST_TRIES]
    if rank >= MOST_TRIES:
        return 0.0
    few = plans[0] < MOST_PAIRS
    share = (FEW_PAIRS_SHARES if few else ATTEMPT_SHARES)[rank]
    look = LOOK_SHARE
    if pairs == plans[rank] < MOST_PAIRS:
        look = _last_look_share(pairs)
    elif pairs > plans[rank]:
        share = LATER_SHARE if few and rank == 0 else 0.0
    return LEVEL * share * look


def with_plan(planned: Sequence[int], rank: int, room: int) -> tuple[int, ...]:
    """Return the plans with that of one candidate, which stays if it was declared before.

    Args:
        planned: declared so far.
        rank: number of candidates that were tried before it.
        room: pairs of launches that the limits allow.
    """
    missing = rank - len(planned)
    if missing < 0:
        return tuple(planned)
    return (*planned, *[MOST_PAIRS] * missing, min(MOST_PAIRS, room))
