"""What is worth saying about a cell, decided once as data, and the texts that say it.

In: a cell's analysis. Out: ``cell_findings`` plans the findings; ``full_answer``, ``short_answer``
and ``verdict_sentences`` put them into words, with the phrases of ``effect_wording`` and
``output_quality_sentences``.
"""
