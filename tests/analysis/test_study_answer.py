"""The answer of a study with several cells, in at most 20 words."""

from labkit.analysis.cell_analysis import analyse
from labkit.analysis.short_answer import short_answer
from labkit.analysis.study_answer import study_answer


def analyses_of(make_cell, **options):
    return [analyse(make_cell(f"study/seed={n}", **options)) for n in (1, 2)]


def test_equal_answers_are_said_once(make_cell):
    both = analyses_of(make_cell, blocks=8)
    alone = short_answer(both[0])
    assert short_answer(both[1]) == alone
    assert study_answer(both) == f"{alone.rstrip('.')}, in all 2 cells."


def test_different_verdicts_name_their_cells(make_cell):
    cells = [
        analyse(make_cell("study/seed=1", blocks=8)),
        analyse(make_cell("study/seed=2", blocks=2)),
    ]
    answer = study_answer(cells)
    assert answer.startswith("Seq map against binary search: ")
    assert " at seed=1" in answer and "estimate only at seed=2" in answer
    assert len(answer.split()) <= 20


def test_one_cell_answers_for_itself(make_cell):
    cell = analyse(make_cell(blocks=8))
    assert study_answer([cell]) == short_answer(cell)
