"""The order of turns: balanced positions, and the same order as in committed studies."""

import random

from labkit.workload.turn_order import Part, RandomTurnOrder


def drawn(parts, seed):
    rounds = RandomTurnOrder(random.Random(seed)).rounds(parts)
    return [(now.part, [arm for arm, _ in now.turns]) for now in rounds]


def test_the_order_of_a_seed_does_not_change_between_versions():
    parts = [Part("a", 3, (2, 0, 1)), Part("b", 2, (1, 2))]
    expected = [(1, [2, 1]), (0, [2, 0, 1]), (0, [1, 2, 0]), (1, [1, 2]), (0, [0, 1, 2])]
    assert drawn(parts, seed=4) == expected


def test_only_arms_of_a_part_have_turns_in_it_and_each_position_equally_often():
    rounds = [
        now for now in RandomTurnOrder(random.Random(1)).rounds([Part("a", 6, (0, 3))]) if now.turns
    ]
    assert len(rounds) == 6
    positions = [dict(now.turns)[3] for now in rounds]
    assert sorted(positions) == [0, 0, 0, 1, 1, 1]
    assert all({arm for arm, _ in now.turns} == {0, 3} for now in rounds)


def test_slices_go_on_until_no_arm_is_unfinished():
    left = {0: 3, 1: 1}
    given = []
    for arm in RandomTurnOrder(random.Random(1)).slices(lambda: [a for a in left if left[a]]):
        left[arm] -= 1
        given.append(arm)
    assert left == {0: 0, 1: 0} and sorted(given) == [0, 0, 0, 1]
    assert set(given[:2]) == {0, 1}
