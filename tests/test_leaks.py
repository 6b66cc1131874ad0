"""The check that runs after every test would notice: a thread of ours, a hook on a module, a global hook."""

from __future__ import annotations

import functools
import json
import threading

import torch
from torch.nn.modules.module import register_module_forward_hook

from tests.leaks import Before, leaks


def note(*_: object) -> None:
    """A hook that does nothing."""


class CallableNote:
    """A hook that is an object."""

    def __call__(self, *_: object) -> None:
        pass


def test_a_thread_of_ours_is_a_leak_until_it_ends() -> None:
    before, stop = Before(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="r3-planted", daemon=True)
    thread.start()
    assert leaks(before, patience_s=0.01) == ["thread r3-planted is still running"]
    assert leaks(Before(), patience_s=0.01) == [], "it was there before"
    stop.set()
    assert leaks(before) == [], "a thread on its way out is waited for"


def test_another_library_s_thread_is_not_ours() -> None:
    before, stop = Before(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="pool-1", daemon=True)
    thread.start()
    assert leaks(before, patience_s=0.01) == []
    stop.set()
    thread.join()


def test_a_module_s_hook_is_a_leak_until_it_is_removed() -> None:
    module = torch.nn.Linear(2, 2)
    for hook in (note, functools.partial(note, 1), CallableNote()):
        before = Before()
        handles = [module.register_forward_hook(hook), module.register_forward_pre_hook(hook)]
        assert len(leaks(before)) == 2
        assert "Linear._forward_hooks holds tests.test_leaks." in "".join(leaks(before))
        assert leaks(Before()) == [], "they were there before"
        for handle in handles:
            handle.remove()
        assert leaks(before) == []


def test_another_library_s_hook_on_a_module_is_not_ours() -> None:
    before, module = Before(), torch.nn.Linear(2, 2)
    module.register_forward_hook(json.dumps)
    assert leaks(before) == []


def test_a_module_that_is_gone_has_no_hooks() -> None:
    before = Before()
    module = torch.nn.Linear(2, 2)
    module.register_forward_hook(note)
    module.itself = [module]  # a cycle: only the garbage collector ends it
    del module
    assert leaks(before) == []


def test_a_global_hook_is_a_leak_whoever_set_it() -> None:
    before = Before()
    handle = register_module_forward_hook(json.dumps)
    assert leaks(before) == ["global_forward_hooks holds json.dumps"]
    handle.remove()
    assert leaks(before) == []
