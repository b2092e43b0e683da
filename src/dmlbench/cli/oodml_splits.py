"""``dmlbench oodml splits``: train-test splits of growing distance, as a file for ``protocol=oodml``."""
