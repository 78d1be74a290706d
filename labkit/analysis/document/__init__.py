"""Tables, charts and sections as data, in no format, and the styles that all formats share.

In: columns with functions, points, and texts. Out: frozen parts that the pages render.
"""
