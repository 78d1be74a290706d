import json
from collections import Counter
from itertools import pairwise
from statistics import quantiles

import pytest

from labkit.workload.sources import packaged_questions

TEXTS = sorted((packaged_questions.PACKAGE_DIR / "texts").glob("*.md"))


def paragraphs(text):
    return [p.strip() for p in text.split("\n\n") if p.strip()]


def test_there_are_at_least_eight_texts_of_an_article_s_length():
    assert len(TEXTS) >= 8
    for path in TEXTS:
        assert 900 <= len(path.read_text("utf-8").split()) <= 1400, path.name


def test_no_paragraph_occurs_twice_anywhere():
    seen = Counter(p for path in TEXTS for p in paragraphs(path.read_text("utf-8")))
    assert [p for p, count in seen.items() if count > 1] == []


def test_no_prompt_repeats_a_paragraph_or_a_long_phrase():
    for question in packaged_questions.questions():
        parts = Counter(paragraphs(question.prompt))
        assert max(parts.values()) == 1, question.question
        words = question.prompt.split()
        phrases = Counter(tuple(words[i : i + 20]) for i in range(len(words) - 20))
        assert max(phrases.values(), default=1) == 1, question.question


def test_the_64_questions_are_distinct_and_of_all_three_kinds():
    questions = packaged_questions.questions()
    assert len(questions) == 64
    assert len({q.question for q in questions}) == 64
    assert len({q.prompt for q in questions}) == 64
    entries = json.loads((packaged_questions.PACKAGE_DIR / "questions.json").read_text("utf-8"))
    general = sum("text" not in e for e in entries)
    part = sum("paragraphs" in e for e in entries)
    assert min(general, part, 64 - general - part) >= 10
    assert {e["text"] for e in entries if "text" in e} == {path.stem for path in TEXTS}


def test_an_excerpt_is_whole_paragraphs_of_its_text():
    entries = json.loads((packaged_questions.PACKAGE_DIR / "questions.json").read_text("utf-8"))
    for entry, question in zip(entries, packaged_questions.questions(), strict=True):
        if "paragraphs" not in entry:
            continue
        whole = (packaged_questions.PACKAGE_DIR / "texts" / f"{entry['text']}.md").read_text(
            "utf-8"
        )
        first, last = entry["paragraphs"]
        assert 0 <= first <= last < len(whole.strip().split("\n\n"))
        assert question.text in whole and len(question.text) > 100


def test_the_order_depends_on_the_seed_and_a_smaller_count_is_a_prefix():
    assert packaged_questions.plan(0, 64) == packaged_questions.plan(0, 64)
    assert packaged_questions.plan(0, 64) != packaged_questions.plan(1, 64)
    assert packaged_questions.plan(0, 64)[:10] == packaged_questions.plan(0, 10)
    order = [question for question, _ in packaged_questions.plan(0, 64)]
    assert sorted(order) == list(range(64))
    assert any(b < a for a, b in pairwise(order))


@pytest.mark.parametrize("seed", range(5))
def test_output_lengths_are_ragged_around_forty(seed):
    lengths = sorted(output for _, output in packaged_questions.plan(seed, 64))
    assert lengths[0] >= 8 and lengths[-1] <= 128
    assert 30 <= lengths[32] <= 55
    assert lengths[-1] > 2 * lengths[16]


def test_half_of_the_output_lengths_lie_within_a_factor_of_two_and_a_quarter():
    """A log-normal of sigma 0.6: its quartiles' ratio is exp(1.349 x 0.6) = 2.25."""
    lengths = [output for seed in range(20) for _, output in packaged_questions.plan(seed, 64)]
    first, middle, third = quantiles(lengths, n=4)
    assert third / first == pytest.approx(2.25, rel=0.1) and middle == pytest.approx(40, rel=0.1)
