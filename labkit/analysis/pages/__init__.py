"""Pages: reports as Markdown, HTML and in the terminal, the index, the history, and articles.

In: analyses, tables, charts and sections. Out: text, and the files of a study's report.
"""
