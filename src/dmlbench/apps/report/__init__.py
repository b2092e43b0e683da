"""What aggregated configs show: a page to look through (``page``), and one picture (``picture``)."""
