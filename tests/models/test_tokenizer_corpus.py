import pytest

from labkit.config import ConfigError
from labkit.models.synthetic.tokenizer_corpus import corpus_texts


def test_the_corpus_texts_exist_in_a_fixed_order():
    texts = corpus_texts()
    assert texts == corpus_texts()
    assert sum(map(len, texts)) > 40_000


def make(folder, texts, questions):
    (folder / "workload" / "texts").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "workload" / "texts" / name).write_text(text)
    if questions is not None:
        (folder / "workload" / "questions.json").write_text(questions)
    return folder


def test_the_corpus_is_texts_by_name_then_question_strings(tmp_path):
    package = make(
        tmp_path,
        {"b.md": "second", "a.md": "first", "c.txt": "not a text"},
        '[{"question": "why?", "text": null}, {"more": ["how?", 3]}]',
    )
    assert corpus_texts(package) == ("first", "second", "why?", "how?")


@pytest.mark.parametrize(
    ("texts", "questions", "missing"),
    [({}, "[]", "texts"), ({"a.md": "x"}, None, "questions.json"), ({"a.txt": "x"}, "[]", "texts")],
)
def test_an_incomplete_installation_is_an_error(tmp_path, texts, questions, missing):
    with pytest.raises(ConfigError, match=missing):
        corpus_texts(make(tmp_path, texts, questions))


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="has no workload"):
        corpus_texts(tmp_path)
