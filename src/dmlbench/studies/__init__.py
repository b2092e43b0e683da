"""Small experiments of papers. Each is a module with ``conduct(cfg, parts) -> Findings`` and a YAML.

``record`` keeps slow parts and writes table and figure; studies that train models share ``trained``.
"""
