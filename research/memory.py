"""How much memory a training step holds: exact bytes of tensors, not what the allocator keeps in reserve."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Follows every storage that an operation creates until it is freed; `peak` is the most that lived at once.

    Views share a storage and count once. Scratch memory inside one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensors: list[Tensor]) -> None:
        """What existed before: in-place operations return it, and it is not ours to count."""
        self._known.update(t.untyped_storage()._cdata for t in tensors)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)  # runs when the last tensor on it goes

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(step: Callable[[], object], existing: list[Tensor]) -> int:
    """The most memory that `step` held at once in tensors of its own; `existing` ones are not counted."""
    tracker = LiveTensors()
    tracker.ignore(existing)
    with tracker:
        step()
    return tracker.peak


def saved_bytes(forward: Callable[[], object], existing: list[Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of `forward`; `existing` (parameters, inputs) not counted."""
    known = {t.untyped_storage()._cdata for t in existing}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # kept until here: a freed storage's address may be used again
    del result
    return sum(sizes.values())
