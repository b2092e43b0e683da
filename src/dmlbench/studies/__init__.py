"""Small experiments that a paper explains itself with: a picture, a table beside what the paper says, and a record.

Modules that ``dmlbench study`` names have ``conduct(cfg, parts) -> Findings``. What takes long is computed in parts,
each kept once it is done (``record.Parts``); table and picture are made of the parts alone, and can be made again.
"""
