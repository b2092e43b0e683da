"""Shared by the benchmarks: the least time of contenders side by side, memory of the process, and a growing report."""

import time
from collections.abc import Callable
from pathlib import Path


class Report:
    """Markdown that grows line by line, on the screen and in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.lines = path, list[str]()

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)
        if self.path is not None:
            self.path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")


def least_seconds(contenders: dict[str, Callable[[], object]], rounds: int, threads: int) -> dict[str, float]:
    """The least time of each contender in turns: of the CPU with one thread, else of the clock."""
    clock = time.process_time if threads == 1 else time.perf_counter
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, action in contenders.items():
            started = clock()
            action()
            least[name] = min(least[name], clock() - started)
    return least


def memory_value(field: str) -> int:
    """Bytes of a line of this process's status: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the system tells no {field}; the part memory needs Linux")
