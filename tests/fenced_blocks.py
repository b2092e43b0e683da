"""The fenced code blocks of a page of the documentation."""

import re
from pathlib import Path
from typing import NamedTuple

_FENCED = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page: its language, the file that its title names, and its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*each) for each in _FENCED.findall(page.read_text(encoding="utf-8"))]
