"""The order of turns: drawn evenly, balanced, as in committed studies."""

import itertools
import random
from collections import Counter

import pytest

from labkit.workload.turn_order import Part, RandomTurnOrder, spread_rounds

ARMS = (0, 3, 5)
DRAWS = 1_200  # of the six orders of three arms: 200 each, standard deviation 13
EVEN = pytest.approx(200, abs=55)


def drawn(parts, seed):
    rounds = RandomTurnOrder(random.Random(seed)).rounds(parts)
    return [(now.part, [arm for arm, _ in now.turns]) for now in rounds]


def test_the_order_of_a_seed_does_not_change_between_versions():
    parts = [Part("a", 3, (2, 0, 1)), Part("b", 2, (1, 2))]
    expected = [(1, [2, 1]), (0, [2, 0, 1]), (0, [1, 2, 0]), (1, [1, 2]), (0, [0, 1, 2])]
    assert drawn(parts, seed=4) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_in_as_many_rounds_as_a_part_has_arms_each_arm_has_each_position_once(count):
    arms = tuple(range(7, 7 + count))
    rounds = [turns for _, turns in drawn([Part("a", 3 * count, arms)], seed=count)]
    for start in range(0, len(rounds), count):
        square = rounds[start : start + count]
        assert all(set(column) == set(arms) for column in zip(*square, strict=True))
        assert all(set(turns) == set(arms) for turns in square)


def test_every_order_of_the_arms_is_drawn_equally_often_in_the_first_and_in_later_rounds():
    parts = [Part("other", 4, (1, 2)), Part("a", 3, ARMS)]
    own = [[turns for part, turns in drawn(parts, seed) if part == 1] for seed in range(DRAWS)]
    for round_of_part in range(3):
        orders = Counter(tuple(rounds[round_of_part]) for rounds in own)
        assert orders == dict.fromkeys(itertools.permutations(ARMS), EVEN)
    # The second round begins with either of the arms that the first did not begin with.
    leads = Counter(rounds[1][0] == rounds[0][1] for rounds in own)
    assert leads == {True: pytest.approx(600, abs=90), False: pytest.approx(600, abs=90)}
    positions = [
        [position for _, position in now.turns]
        for now in RandomTurnOrder(random.Random(1)).rounds(parts)
    ]
    assert all(each == list(range(len(each))) for each in positions)


def test_each_part_has_a_round_at_a_random_place_of_every_section_of_the_schedule():
    counts, places = (1, 4, 12), Counter()
    for seed in range(DRAWS):
        order = spread_rounds(counts, random.Random(seed))
        assert Counter(order) == dict(enumerate(counts))
        places[order.index(0)] += 1
        twelve = [place for place, part in enumerate(order) if part == 2]
        # At most one round of each twelfth lies before a round, and the others' five in between.
        assert all(i <= place <= i + 5 for i, place in enumerate(twelve))
        four = [sum(p < place for p in twelve) for place, part in enumerate(order) if part == 1]
        assert all(3 * i <= before <= 3 * (i + 1) for i, before in enumerate(four))
    assert len(places) == sum(counts) and max(places.values()) < 2 * DRAWS / sum(counts)


def given_slices(seed, left):
    """Return the arms in the order of their slices; ``left``: the slices that each arm needs."""
    given = []
    for arm in RandomTurnOrder(random.Random(seed)).slices(lambda: [a for a in left if left[a]]):
        left[arm] -= 1
        given.append(arm)
    return given


def test_the_arms_of_each_round_of_slices_are_shuffled_anew():
    drawn_slices = [given_slices(seed, dict.fromkeys(ARMS, 2)) for seed in range(DRAWS)]
    for place in (0, 3):
        orders = Counter(tuple(given[place : place + 3]) for given in drawn_slices)
        assert orders == dict.fromkeys(itertools.permutations(ARMS), EVEN)
    same = sum(given[:3] == given[3:] for given in drawn_slices)
    assert same == EVEN  # one of six


def test_slices_go_on_until_no_arm_is_unfinished():
    left = {0: 3, 1: 1}
    given = given_slices(1, left)
    assert left == {0: 0, 1: 0} and sorted(given) == [0, 0, 0, 1]
    assert set(given[:2]) == {0, 1}
