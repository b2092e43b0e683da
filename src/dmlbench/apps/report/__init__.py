"""What aggregated cells show: a page to look through (``page``), and one picture (``picture``)."""
