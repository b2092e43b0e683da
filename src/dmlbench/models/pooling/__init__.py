"""Poolings: from the backbone's last map to one embedding per image, each in a module of its own."""
