"""The report of a study: tables and charts declared once, and a thin renderer for each format."""
