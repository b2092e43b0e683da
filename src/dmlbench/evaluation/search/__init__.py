"""Exact search, among unit vectors and by any distance."""
