"""What every long-lived process of ours does once it has loaded."""

from __future__ import annotations

import gc


def settle() -> None:
    """Takes all objects made so far out of the garbage collector's sight.

    A full collection over what torch, transformers and a tokenizer leave behind stops the process
    for 0.1 to 0.3 s, in the middle of its streams.
    """
    gc.collect()
    gc.freeze()
