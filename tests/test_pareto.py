"""Front, hypervolume and improvement against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.pareto import (
    front_regret,
    hypervolume,
    improvement,
    knee,
    nondominated,
    probability_nondominated,
    reference_point,
)

REFERENCE = np.array([1.0, 1.0])


def brute_front(points: np.ndarray) -> np.ndarray:
    return np.array(
        [not any((other <= p).all() and (other < p).any() for other in points) for p in points]
    )


def grid_volume(points: np.ndarray, cells: int = 40) -> float:
    """Area by counting cells: exact for points that stand on the grid."""
    middle = (np.arange(cells) + 0.5) / cells
    e, t = np.meshgrid(middle, middle)
    covered = np.zeros_like(e, dtype=bool)
    for point in points:
        covered |= (e > point[0]) & (t > point[1])
    return float(covered.mean())


def on_grid(rng: np.random.Generator, n: int, cells: int = 40) -> np.ndarray:
    return rng.integers(0, cells + 8, size=(n, 2)) / cells  # some lie beyond the reference


@pytest.mark.parametrize("n", [1, 2, 5, 30])
@pytest.mark.parametrize("seed", range(4))
def test_nondominated_is_brute_force(n: int, seed: int) -> None:
    points = np.random.default_rng(seed).integers(0, 6, size=(n, 2)).astype(float)  # many ties
    assert (nondominated(points[:, 0], points[:, 1]) == brute_front(points)).all()


def test_equal_points_are_all_on_the_front() -> None:
    assert nondominated(np.array([1.0, 1, 2]), np.array([1.0, 1, 1])).tolist() == [
        True,
        True,
        False,
    ]
    assert nondominated(np.empty(0), np.empty(0)).shape == (0,)


@pytest.mark.parametrize("n", [0, 1, 3, 20])
@pytest.mark.parametrize("seed", range(4))
def test_hypervolume_counts_cells(n: int, seed: int) -> None:
    points = on_grid(np.random.default_rng(seed), n)
    assert hypervolume(points, REFERENCE) == pytest.approx(grid_volume(points), abs=1e-9)


@pytest.mark.parametrize("n", [0, 1, 3, 20])
@pytest.mark.parametrize("seed", range(4))
def test_improvement_is_the_difference_of_two_hypervolumes(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    front, new = on_grid(rng, n), on_grid(rng, 60)
    expected = [
        hypervolume(np.vstack([front, point]), REFERENCE) - hypervolume(front, REFERENCE)
        for point in new
    ]
    gains = improvement(front, new[:, 0], new[:, 1], REFERENCE)
    assert gains == pytest.approx(expected, abs=1e-9)


def test_improvement_keeps_the_shape_and_far_points_gain_nothing() -> None:
    front = np.array([[0.5, 0.5]])
    gains = improvement(front, np.array([[2.0, 0.4], [0.5, -1.0]]), np.full((2, 2), 0.4), REFERENCE)
    assert gains.shape == (2, 2)
    assert gains[0, 0] == 0
    assert gains[1, 0] == pytest.approx(0.5 * 0.1)
    assert gains[1, 1] == pytest.approx(2.0 * 0.6 - 0.25)


def test_reference_is_the_nadir_of_the_front_with_a_margin() -> None:
    points = np.array([[0.0, 1.0], [2.0, 0.0], [5.0, 5.0]])
    assert reference_point(points) == pytest.approx([2.2, 1.1])
    assert reference_point(points[:1]) == pytest.approx([0.005, 1.005])


def test_probability_is_the_share_of_draws() -> None:
    energy = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    time = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert probability_nondominated(energy, time) == pytest.approx([0.75, 0.5])


def test_the_knee_bends_most() -> None:
    energy = np.array([10.0, 2.0, 1.5, 1.0, 20.0])
    time = np.array([1.0, 1.2, 3.0, 10.0, 20.0])
    assert knee(np.column_stack([energy, time])) == 1
    assert knee([(3.0, 5.0)]) == 0
    assert knee([(3.0, 5.0), (4.0, 1.0)]) == 1  # no bend: the least product
    assert knee([(9.0, 9.0), (3.0, 5.0)]) == 1  # a dominated point is passed over


def test_front_regret_is_what_a_person_loses_at_the_worst_point_of_the_front() -> None:
    points = np.log([(1.0, 4.0), (2.0, 2.0), (4.0, 1.0), (5.0, 5.0)])
    assert front_regret(points[:3], points) == 0
    assert front_regret(points, points[:3]) == 0
    # (2, 2) is matched by a point 3 % slower and 1 % more frugal, and by one 4 % worse in energy.
    near = np.log([(1.0, 4.0), (1.98, 2.06), (2.08, 1.9), (4.0, 1.0)])
    assert front_regret(near, points) == pytest.approx(0.03)
    assert front_regret(points[[0, 2]], points) == pytest.approx(1.0)  # twice the energy, or time
    assert front_regret(np.empty((0, 2)), points) == np.inf
    # A found point beyond the front, which noise makes of it, is no negative loss.
    assert front_regret(points - 0.1, points) == 0
    rng = np.random.default_rng(3)
    for _ in range(20):
        every, some = on_grid(rng, 12), on_grid(rng, 4)
        worse = [min(max(*(f - p)) for f in some) for p in every]
        assert front_regret(some, every) == pytest.approx(np.expm1(max(0.0, *worse)))
