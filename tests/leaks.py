"""What may not outlive a test: a thread of ours, and a torch hook that a test or one of our packages set."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

THREAD_PREFIX = "r3-"
OURS = ("protocol", "engine_side", "collector", "tests", "deploy")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_module_registration_hooks",
)


@dataclass(frozen=True, slots=True)
class Before:
    """What was there when a test began; a longer-lived fixture's threads and hooks are among it."""

    threads: frozenset[int] = field(default_factory=lambda: frozenset(id(each) for each in threading.enumerate()))
    next_hook: int = field(default_factory=lambda: _next_hook())


def leaks(before: Before, patience_s: float = 5.0) -> list[str]:
    """One line per leak. A thread that is on its way out is waited for, `patience_s` seconds at most."""
    return [*_threads(before, patience_s), *_hooks(before)]


def _threads(before: Before, patience_s: float) -> Iterator[str]:
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_PREFIX) and id(thread) not in before.threads:
            thread.join(patience_s)
            if thread.is_alive():
                yield f"thread {thread.name} is still running"


def _hooks(before: Before) -> Iterator[str]:
    """Torch numbers its hooks: one set since then has a number of at least `before.next_hook`."""
    if _next_hook() == before.next_hook:
        return
    gc.collect()  # a model that went with its test takes its hooks along
    module_file = sys.modules["torch.nn.modules.module"]
    for name in GLOBAL_HOOKS:
        for number, hook in getattr(module_file, name).items():
            if number >= before.next_hook:
                yield f"{name[1:]} holds {_name(hook)}"
    for module in [each for each in gc.get_objects() if issubclass(type(each), module_file.Module)]:
        for name in MODULE_HOOKS:
            for number, hook in module.__dict__.get(name, {}).items():
                if number >= before.next_hook and _owner(hook).partition(".")[0] in OURS:
                    yield f"{type(module).__name__}.{name} holds {_name(hook)}"


def _next_hook() -> int:
    hooks = sys.modules.get("torch.utils.hooks")
    return 0 if hooks is None else int(hooks.RemovableHandle.next_id)


def _unwrap(hook: Callable[..., Any]) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _owner(hook: Callable[..., Any]) -> str:
    """Module that the hook's function or, for an object that can be called, its class was defined in."""
    inner = _unwrap(hook)
    return str(getattr(inner, "__module__", None) or type(inner).__module__)


def _name(hook: Callable[..., Any]) -> str:
    inner = _unwrap(hook)
    return f"{_owner(hook)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
