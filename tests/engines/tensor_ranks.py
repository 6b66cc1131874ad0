"""One rank of an engine that is spread over several processes, under capture: what it saw and held, as JSON.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 python -m tests.engines.tensor_ranks COLLECTOR RENDEZVOUS SEED CASE

CASE: `tensor`; `experts`, which spreads whole experts too; `silent`, in which the hooks of rank 0 lose a layer.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import threading
from typing import Any

import torch
import transformers
from transformers import Qwen3MoeForCausalLM, modeling_utils
from transformers.distributed import DistributedConfig
from transformers.generation.continuous_batching import cache as engine
from transformers.generation.continuous_batching.distributed import DistributedHelper

from engine_side.capture.errors import CaptureRefused
from engine_side.capture.hooks import find_routers
from engine_side.capture.recorder import RouteRecorder
from engine_side.capture.slot_store import SlotStore
from engine_side.engines.transformers import capture_routes
from tests.engines.memory import sized
from tests.engines.running import generation
from tests.harness.tiny import CHECKPOINT, prompts

MEMORY = 24 << 20


def load(case: str) -> Any:
    """The tiny model, its layers spread over the ranks."""
    # The loader asks whether accelerate is installed, of which it uses nothing for one device a process.
    modeling_utils.check_and_set_device_map = lambda device: {"": torch.device(device)}
    if transformers.__version__.startswith("5.17."):
        # It cannot split 257 tokens over two ranks: each has the whole language head.
        Qwen3MoeForCausalLM._tp_plan = {}
        spread = DistributedConfig(tp_size=2, enable_expert_parallel=case == "experts")
    else:
        spread = DistributedConfig(tp_size=2, ep_size=2 if case == "experts" else 1)
    return Qwen3MoeForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True, distributed_config=spread
    ).eval()


def watch(model: Any) -> Any:
    """A digest of what all experts are called with, in order: what this rank chose."""
    digest = hashlib.sha256()

    def look(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        digest.update(inputs[1].numpy().tobytes())

    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(look)
    return digest


def note_sizes() -> list[list[int]]:
    """(tokens of a batch, blocks) that this rank came to by itself, before the smallest of all ranks is taken."""
    found: list[list[int]] = []
    reduce = DistributedHelper.tp_all_reduce_min

    def note(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(value.tolist())
        return reduce(self, value, *args, **kwargs)

    DistributedHelper.tp_all_reduce_min = note
    return found


def lose_a_layer() -> None:
    """Have the hooks of the third MoE layer find nothing."""
    keep = RouteRecorder.keep
    RouteRecorder.keep = lambda self, index, ids: None if index == 2 else keep(self, index, ids)  # type: ignore[method-assign]


def main(collector: str, rendezvous: str, seed: int, case: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    engine.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), MEMORY, 0, 0)
    model, sizes = load(case), note_sizes()
    digest = watch(model)
    if case == "silent":
        lose_a_layer()
    found: dict[str, Any] = {"rank": rank}
    try:
        with capture_routes(model, collector, engine_id=f"rank-{rank}") as capture:
            outputs = model.generate_batch(
                prompts(8, seed, families=2, shared=(100, 140)),
                generation_config=generation(6),
                continuous_batching_config=sized(),
                persistent_manager=True,
            )
            routers = find_routers(model).values()
            found["hooks"] = sum(len(router._forward_hooks) for router in routers) + len(model._forward_hooks)
            found["stores"] = [each.nbytes for each in gc.get_objects() if type(each) is SlotStore]
            found["shippers"] = [each.name for each in threading.enumerate() if each.name == "r3-shipper"]
            found["blocks"] = model._cached_continuous_batching_manager.batch_processor.cache.num_blocks
            found["tokens"] = {name: [*out.prompt_ids, *out.generated_tokens] for name, out in outputs.items()}
            model.destroy_cached_continuous_batching_manager()
        found |= {"stats": capture.stats().as_dict(), "drained": capture.drained}
    except CaptureRefused as refused:
        found |= {"refused": str(refused), "keys": refused.keys}
    return found | {"sizes": sizes, "digest": digest.hexdigest()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])), flush=True)
    # No barrier at the end: a rank that failed would be waited for.
    os._exit(0)
