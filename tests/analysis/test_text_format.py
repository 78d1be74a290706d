"""Names become phrases and file stems."""

import re

from labkit.analysis.text_format import distinct_slugs, join_names, slug


def test_names_become_a_phrase():
    names = [join_names("abcd"[:n]) for n in range(5)]
    assert names == ["", "a", "a and b", "a, b and c", "a, b, c and d"]
    assert join_names("abc", "or") == "a, b or c"


def test_a_name_becomes_a_file_stem():
    for name, stem in {"a b/c.d_e": "a-b-c.d_e", "..-x-.": "x", "": "unnamed", "?": "unnamed",
                       "past, 8 × 512": "past-8-512", "x" * 80: "x" * 80}.items():  # fmt: skip
        assert slug(name) == stem
    long, other = slug("x" * 81), slug("x" * 82)
    assert len(long) == 80 and long != other and re.fullmatch(r"x{71}-[0-9a-f]{8}", long)
    assert re.fullmatch(r"a-[0-9a-f]{8}", slug("a. " * 9 + "b", 12))


def test_names_in_any_script_and_with_other_signs_have_stems_of_their_own():
    names = ["workload=чат", "workload=рваный", "≤ 8", "≥ 8", "8", "чат", "рваный", "é"]
    stems = list(map(slug, names))
    assert len(set(stems)) == len(names) and all(re.fullmatch(r"[\w.-]+", s, re.A) for s in stems)
    assert re.fullmatch(r"workload-[0-9a-f]{8}", stems[0])
    sums = distinct_slugs(["2+2", "2*2", "2-2", "3"])
    assert sums["2+2"] == "2-2" and sums["3"] == "3" and len(set(sums.values())) == 4
