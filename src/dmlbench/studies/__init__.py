"""Small experiments of papers. Each is a function ``(args, parts) -> Findings`` and a YAML.

``record`` keeps slow parts and writes table and figure; studies that train models share ``trained``.
"""
