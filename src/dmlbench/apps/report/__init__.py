"""What aggregated configs show: a page to look through, and one picture."""
