"""Result files of other tools, as runs of labkit.

In: files that are recognised by their content (:mod:`labkit.importers.result_files`), one module
per family of tools. Out: :class:`labkit.importers.imported_run.ImportedRun`, their order
(:mod:`labkit.importers.exchangeable_blocks`), and a study of records
(:mod:`labkit.importers.study_writer`).
"""
