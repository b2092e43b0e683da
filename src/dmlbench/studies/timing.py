"""Times of actions that are compared with each other, taken in turns."""

import random
import time
from collections.abc import Callable, Mapping

import torch

Action = Callable[[], object]


def in_turns(
    actions: Mapping[str, Action], rounds: int, device: torch.device | str, *, of_processor: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of each action in each round; every round runs each of them once, in an order of its own.

    The order matters: who comes after an action that fills the caches pays for it. A first round warms up and does not
    count.

    Args:
        actions: by name.
        rounds: that count.
        device: what the actions work on; a GPU is waited for.
        of_processor: take the process's own time instead of the clock's, which leaves out what other processes of a
            busy machine take; not for a GPU.
    """
    on_gpu = torch.device(device).type != "cpu"
    clock = time.process_time if of_processor and not on_gpu else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in actions}
    order, shuffle = list(actions.items()), random.Random(0).shuffle
    for turn in range(rounds + 1):
        shuffle(order)
        for name, action in order:
            if on_gpu:
                torch.cuda.synchronize()
            started = clock()
            action()
            if on_gpu:
                torch.cuda.synchronize()
            if turn > 0:
                times[name].append(1000 * (clock() - started))
    return times
