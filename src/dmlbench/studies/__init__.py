"""Small experiments of papers. Each is a function ``(cfg, parts) -> Findings`` and a YAML.

``record`` keeps slow parts and writes table and figure; studies that train models share ``trained``.
"""
